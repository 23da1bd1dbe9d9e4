#pragma once

// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, Algorithm 2):
//
//   p <- p (1 - lr wd) - lr sign(b1 m + (1 - b1) g)
//   m <- b2 m + (1 - b2) g

#include "core/host_device.h"
#include "math/optim/rule.h"

namespace dltrain::math {

struct LionElement {
  float lr, decay;  // decay: 1 - lr wd
  float beta1, one_less_beta1, beta2, one_less_beta2, grad_factor;

  DLT_HD void operator()(float& p, float g, float& m) const {
    const float d = g * grad_factor, c = beta1 * m + one_less_beta1 * d;
    p = p * decay - (c > 0.0f ? lr : c < 0.0f ? -lr : lr * c);  // a NaN stays
    m = beta2 * m + one_less_beta2 * d;
  }
};

struct Lion {
  static constexpr const char* name = "lion";

  double beta1 = 0.9, beta2 = 0.99, weight_decay = 0.0;
  static constexpr auto hyper() {
    return std::tuple{Hyper{"beta1", &Lion::beta1}, Hyper{"beta2", &Lion::beta2}, Hyper{"weight_decay", &Lion::weight_decay}};
  }

  static constexpr std::array states = {State{.key = "exp_avg", .coded = true}};
  static constexpr bool compact = true;

  template <unsigned states>
  using Element = LionElement;

  DLT_HD LionElement at(const PerTensor&, double lr, double grad_factor) const {
    LionElement element;
    element.lr = static_cast<float>(lr);
    element.decay = static_cast<float>(1.0 - lr * weight_decay);
    element.beta1 = static_cast<float>(beta1);
    element.one_less_beta1 = static_cast<float>(1.0 - beta1);
    element.beta2 = static_cast<float>(beta2);
    element.one_less_beta2 = static_cast<float>(1.0 - beta2);
    element.grad_factor = static_cast<float>(grad_factor);
    return element;
  }
};

}  // namespace dltrain::math
