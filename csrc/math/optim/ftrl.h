#pragma once

// FTRL-Proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013, Algorithm 1), one rate for each coordinate:
//
//   s = (sqrt(n + g^2) - sqrt(n)) / lr
//   z <- z + g - s p                    n <- n + g^2
//   p <- 0 where |z| <= l1, else -(z - sign(z) l1) / ((beta + sqrt(n)) / lr + l2)
//
// The parameter follows from z and n alone, so its initial value counts only through the first gradient.

#include <cmath>

#include "core/host_device.h"
#include "math/optim/rule.h"

namespace dltrain::math {

struct FTRLElement {
  float lr, beta, lambda1, lambda2, grad_factor;

  DLT_HD void operator()(float& p, float g, float& z, float& n) const {
    const float d = g * grad_factor, sum = n + d * d, root = sqrtf(sum);
    z += d - (root - sqrtf(n)) / lr * p;
    n = sum;
    const float beyond = z - (z > 0.0f ? lambda1 : -lambda1);
    p = fabsf(z) <= lambda1 ? 0.0f : -beyond / ((beta + root) / lr + lambda2);
  }
};

struct FTRL {
  static constexpr const char* name = "ftrl";

  double beta = 1.0, lambda_1 = 0.0, lambda_2 = 0.0;
  static constexpr auto hyper() {
    return std::tuple{Hyper{"beta", &FTRL::beta}, Hyper{"lambda_1", &FTRL::lambda_1}, Hyper{"lambda_2", &FTRL::lambda_2}};
  }

  static constexpr std::array states = {State{.key = "z"}, State{.key = "n", .nonnegative = true}};

  template <unsigned states>
  using Element = FTRLElement;

  DLT_HD FTRLElement at(const PerTensor&, double lr, double grad_factor) const {
    FTRLElement element;
    element.lr = static_cast<float>(lr);
    element.beta = static_cast<float>(beta);
    element.lambda1 = static_cast<float>(lambda_1);
    element.lambda2 = static_cast<float>(lambda_2);
    element.grad_factor = static_cast<float>(grad_factor);
    return element;
  }
};

}  // namespace dltrain::math
