#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "math/optim/adamw.h"
#include "math/optim/lars.h"
#include "math/optim/sgd.h"

// What a step does to one element.

namespace dltrain {
namespace {

TEST(AdamW, OneElementAgainstDouble) {
  double p = 0.7, m = 0.1, v = 0.02;
  const double g = -0.3, lr = 1e-2, b1 = 0.8, b2 = 0.95, eps = 1e-6, wd = 0.1, step = 4;
  float pf = 0.7f, mf = 0.1f, vf = 0.02f;
  math::AdamW{b1, b2, eps, wd}.at({.counters = {step}}, lr, 1.0)(pf, static_cast<float>(g), mf, vf);
  p *= 1 - lr * wd;
  m = b1 * m + (1 - b1) * g;
  v = b2 * v + (1 - b2) * g * g;
  p -= lr * (m / (1 - std::pow(b1, step))) / (std::sqrt(v / (1 - std::pow(b2, step))) + eps);
  EXPECT_NEAR(pf, p, 1e-7);
  EXPECT_NEAR(mf, m, 1e-8);
  EXPECT_NEAR(vf, v, 1e-8);
}

TEST(AdamW, AMSGradKeepsTheLargestAndANaN) {
  const auto element = math::AdamW{}.at({.counters = {1.0}}, 1e-3, 1.0);
  float p = 1, m = 0, v = 0, max_v = 5;
  element(p, 1.0f, m, v, max_v);
  EXPECT_EQ(max_v, 5.0f);
  element(p, std::numeric_limits<float>::quiet_NaN(), m, v, max_v);
  EXPECT_TRUE(std::isnan(max_v));
}

TEST(SGD, OneElementAgainstDouble) {
  for (const bool nesterov : {false, true}) {
    for (const bool first : {false, true}) {
      double p = 0.7, b = first ? 0.0 : 0.4;
      const double g = -0.3, lr = 1e-2, mu = 0.9, tau = nesterov ? 0.0 : 0.1, wd = 0.2;
      float pf = 0.7f, bf = static_cast<float>(b);
      math::SGD{mu, tau, wd, nesterov}.at(first, lr, 0.5)(pf, static_cast<float>(2 * g), bf);
      const double d = g + wd * p;
      b = first ? d : mu * b + (1 - tau) * d;
      p -= lr * (nesterov ? d + mu * b : b);
      EXPECT_NEAR(pf, p, 1e-7);
      EXPECT_NEAR(bf, b, 1e-7);
    }
  }
}

TEST(LARS, OneElementAgainstDouble) {
  for (const bool inside : {false, true}) {
    for (const bool clip : {false, true}) {
      const double g = -0.3, lr = 0.5, mu = 0.9, wd = 0.2, eta = 0.02, eps = 1e-3, norm = 3.0, grad_norm = 0.4, scale = 8.0;
      double p = 0.7, b = 0.4, ratio = eta * norm / (grad_norm + wd * norm + eps);
      if (clip) ratio = std::min(ratio / lr, 1.0);
      auto pf = static_cast<float>(p), bf = static_cast<float>(b);
      const math::LARS lars{mu, wd, eta, eps, false, inside, clip};
      lars.adapted(norm * norm, scale * scale * grad_norm * grad_norm, lr, -1.0 / scale)(pf, static_cast<float>(-scale * g), bf);
      b = mu * b + (inside ? lr : 1.0) * ratio * (g + wd * p);
      p -= (inside ? 1.0 : lr) * b;
      EXPECT_NEAR(pf, p, 1e-7);
      EXPECT_NEAR(bf, b, 1e-7);
    }
  }
}

TEST(LARS, WithoutARatioTheDecayIsOptional) {
  const auto decay = [](const math::SGDElement& element) { return element.weight_decay; };
  math::LARS lars{0.9, 0.25};
  lars.decays_excluded = false;
  EXPECT_EQ(decay(lars.excluded(1.0, 1.0)), 0.0f);
  EXPECT_EQ(decay(lars.adapted(0.0, 1.0, 1.0, 1.0)), 0.25f);
  EXPECT_EQ(decay(lars.adapted(1.0, 1.0, 1.0, 1.0)), 0.25f);
  EXPECT_EQ(lars.adapted(0.0, 1.0, 0.5, 1.0).share, 0.5f);  // only the learning rate
  lars.decays_excluded = true;
  lars.decays_at_zero_norm = false;
  EXPECT_EQ(decay(lars.excluded(1.0, 1.0)), 0.25f);
  EXPECT_EQ(decay(lars.adapted(1.0, 0.0, 1.0, 1.0)), 0.0f);
}

}  // namespace
}  // namespace dltrain
