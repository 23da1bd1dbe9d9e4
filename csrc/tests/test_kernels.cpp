#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>

#include "kernels/adamw.h"
#include "kernels/fold.h"

namespace dltrain {
namespace {

void two_threads(int64_t n, int64_t, const Range& body) {
  std::thread other([&] { body(0, n / 3); });
  body(n / 3, n);
  other.join();
}

TEST(AdamW, OneElementAgainstDouble) {
  double p = 0.7, m = 0.1, v = 0.02;
  const double g = -0.3, lr = 1e-2, b1 = 0.8, b2 = 0.95, eps = 1e-6, wd = 0.1, step = 4;
  float pf = 0.7f, mf = 0.1f, vf = 0.02f;
  math::AdamW{lr, b1, b2, eps, wd}.at(step)(pf, static_cast<float>(g), mf, vf);
  p *= 1 - lr * wd;
  m = b1 * m + (1 - b1) * g;
  v = b2 * v + (1 - b2) * g * g;
  p -= lr * (m / (1 - std::pow(b1, step))) / (std::sqrt(v / (1 - std::pow(b2, step))) + eps);
  EXPECT_NEAR(pf, p, 1e-7);
  EXPECT_NEAR(mf, m, 1e-8);
  EXPECT_NEAR(vf, v, 1e-8);
}

TEST(AdamW, AMSGradKeepsTheLargestAndANaN) {
  const auto element = math::AdamW{}.at(1);
  float p = 1, m = 0, v = 0, max_v = 5;
  element(p, 1.0f, m, v, max_v);
  EXPECT_EQ(max_v, 5.0f);
  element(p, std::numeric_limits<float>::quiet_NaN(), m, v, max_v);
  EXPECT_TRUE(std::isnan(max_v));
}

TEST(AdamW, TheSameBitsForAnyNumberOfThreads) {
  const std::vector<int64_t> sizes = {1, 0, 7, 40000, 3, 64, 100001};
  const auto run = [&](const Place& place) {
    std::vector<std::array<std::vector<float>, 4>> rows;
    std::vector<float> steps(sizes.size());
    AdamWTensors<4> tensors;
    for (int64_t size : sizes) {
      auto& row = rows.emplace_back();
      for (auto& stream : row) {
        for (int64_t i = 0; i < size; ++i) stream.push_back(static_cast<float>(i % 97 + 1) / 100);
      }
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      steps[i] = static_cast<float>(i);
      tensors.list.add({rows[i][0].data(), rows[i][1].data(), rows[i][2].data(), rows[i][3].data()}, sizes[i]);
      tensors.steps.push_back(&steps[i]);
    }
    adamw(place, tensors, {});
    EXPECT_EQ(steps[6], 7.0f);
    return rows;
  };
  EXPECT_EQ(run({serial_for}), run({two_threads}));
}

TEST(Fold, AddsInTheOrderGiven) {
  // 1e8 + -1e8 + 1 is 1 in this order and 0 in another.
  std::vector<float> own(5000, -1e8f), first(5000, 1e8f), last(5000, 1.0f);
  fold({}, own.data(), {first.data(), last.data()}, 1, 5000, {});
  for (float value : own) ASSERT_EQ(value, 1.0f);
  std::vector<float> own_last(5000, 2.0f);
  fold({}, own_last.data(), {first.data(), first.data()}, 2, 5000, {0.5f});
  for (float value : own_last) ASSERT_EQ(value, 2e8f + 1.0f);
}

TEST(Fold, ScalesOnlyMyOwn) {
  std::vector<float> own(3000, 3.0f), other(3000, 5.0f);
  fold({}, own.data(), {other.data()}, 0, 3000, {0.5f});
  for (float value : own) ASSERT_EQ(value, 6.5f);
  fold({}, own.data(), {}, 0, 3000, {2.0f});
  for (float value : own) ASSERT_EQ(value, 13.0f);
}

}  // namespace
}  // namespace dltrain
