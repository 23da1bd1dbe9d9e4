#pragma once

#include "core/host_device.h"

namespace dltrain::math {

// Running means of the gradient and of its square:  m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2.
struct Moments {
  float beta1, one_less_beta1, beta2, one_less_beta2;

  static DLT_HD Moments of(double beta1, double beta2) {
    return {static_cast<float>(beta1), static_cast<float>(1.0 - beta1), static_cast<float>(beta2), static_cast<float>(1.0 - beta2)};
  }

  DLT_HD void add(float g, float& m, float& v) const {
    m = beta1 * m + one_less_beta1 * g;
    // The factors are multiplied in this order, because g * g would overflow earlier.
    v = beta2 * v + (one_less_beta2 * g) * g;
  }
};

}  // namespace dltrain::math
