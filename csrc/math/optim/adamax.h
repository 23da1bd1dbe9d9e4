#pragma once

// Adamax (Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, Algorithm 2), as torch.optim.Adamax writes it:
//
//   g <- g + wd p
//   m <- b1 m + (1 - b1) g              u <- max(b2 u, |g| + eps)
//   p <- p - lr / (1 - b1^t)  m / u

#include <cmath>

#include "core/host_device.h"
#include "math/optim/decay.h"
#include "math/optim/rule.h"

namespace dltrain::math {

struct AdamaxElement {
  float beta1, one_less_beta1, beta2;
  float step_size;  // lr / (1 - b1^t)
  float eps, weight_decay, grad_factor;

  DLT_HD void operator()(float& p, float g, float& m, float& u) const {
    const float d = with_decay(g * grad_factor, weight_decay, p);
    m = beta1 * m + one_less_beta1 * d;
    const float before = beta2 * u, now = fabsf(d) + eps;
    u = before > now || before != before ? before : now;  // a NaN in either one stays
    p -= step_size * (m / u);
  }
};

struct Adamax {
  static constexpr const char* name = "adamax";

  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
  static constexpr auto hyper() {
    return std::tuple{Hyper{"beta1", &Adamax::beta1}, Hyper{"beta2", &Adamax::beta2}, Hyper{"eps", &Adamax::eps},
                      Hyper{"weight_decay", &Adamax::weight_decay}};
  }

  static constexpr std::array states = {State{.key = "exp_avg"}, State{.key = "exp_inf", .nonnegative = true}};
  static constexpr std::array counters = {Counter{"step"}};
  DLT_HD void advance(float& step) const { step += 1.0f; }

  template <unsigned states>
  using Element = AdamaxElement;

  DLT_HD AdamaxElement at(const PerTensor& tensor, double lr, double grad_factor) const {
    AdamaxElement element;
    element.beta1 = static_cast<float>(beta1);
    element.one_less_beta1 = static_cast<float>(1.0 - beta1);
    element.beta2 = static_cast<float>(beta2);
    element.step_size = static_cast<float>(lr / (1.0 - pow(beta1, tensor.counters[0])));
    element.eps = static_cast<float>(eps);
    element.weight_decay = static_cast<float>(weight_decay);
    element.grad_factor = static_cast<float>(grad_factor);
    return element;
  }
};

}  // namespace dltrain::math
