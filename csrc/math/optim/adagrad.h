#pragma once

// Adagrad (Duchi, Hazan & Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011), as
// torch.optim.Adagrad writes it, for the t-th step:
//
//   g <- g + wd p
//   s <- s + g^2                             s begins with an initial value
//   p <- p - lr / (1 + (t - 1) decay)  g / (sqrt(s) + eps)

#include <cmath>

#include "core/host_device.h"
#include "math/optim/decay.h"
#include "math/optim/rule.h"

namespace dltrain::math {

struct AdagradElement {
  float step_size;  // lr / (1 + (t - 1) decay)
  float weight_decay, eps, grad_factor;

  DLT_HD void operator()(float& p, float g, float& sum) const {
    const float d = with_decay(g * grad_factor, weight_decay, p);
    sum += d * d;
    p -= step_size * (d / (sqrtf(sum) + eps));
  }
};

struct Adagrad {
  static constexpr const char* name = "adagrad";

  double lr_decay = 0.0, weight_decay = 0.0, eps = 1e-10;
  static constexpr auto hyper() {
    return std::tuple{Hyper{"lr_decay", &Adagrad::lr_decay}, Hyper{"weight_decay", &Adagrad::weight_decay}, Hyper{"eps", &Adagrad::eps}};
  }

  static constexpr std::array states = {State{.key = "sum", .nonnegative = true}};
  static constexpr std::array counters = {Counter{"step"}};
  DLT_HD void advance(float& step) const { step += 1.0f; }

  template <unsigned states>
  using Element = AdagradElement;

  DLT_HD AdagradElement at(const PerTensor& tensor, double lr, double grad_factor) const {
    AdagradElement element;
    element.step_size = static_cast<float>(lr / (1.0 + (tensor.counters[0] - 1.0) * lr_decay));
    element.weight_decay = static_cast<float>(weight_decay);
    element.eps = static_cast<float>(eps);
    element.grad_factor = static_cast<float>(grad_factor);
    return element;
  }
};

}  // namespace dltrain::math
