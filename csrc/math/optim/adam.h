#pragma once

// Adam (Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015), as torch.optim.Adam writes it: the step of AdamW, with weight
// decay added to the gradient instead of applied to the parameter:
//
//   g <- g + wd p
//   m <- b1 m + (1 - b1) g              v <- b2 v + (1 - b2) g^2
//   p <- p - lr / (1 - b1^t)  m / (sqrt(v) / sqrt(1 - b2^t) + eps)

#include "core/host_device.h"
#include "math/optim/adamw.h"
#include "math/optim/decay.h"
#include "math/optim/rule.h"

namespace dltrain::math {

struct AdamElement {
  AdamWElement adamw;
  float weight_decay, grad_factor;

  template <class... States>
  DLT_HD void operator()(float& p, float g, States&... states) const {
    adamw(p, with_decay(g * grad_factor, weight_decay, p), states...);
  }
};

struct Adam {
  static constexpr const char* name = "adam";

  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
  bool decoupled_weight_decay = false;  // as in AdamW
  static constexpr auto hyper() {
    return std::tuple{Hyper{"beta1", &Adam::beta1}, Hyper{"beta2", &Adam::beta2}, Hyper{"eps", &Adam::eps},
                      Hyper{"weight_decay", &Adam::weight_decay}, Hyper{"decoupled_weight_decay", &Adam::decoupled_weight_decay}};
  }

  static constexpr std::array states = AdamW::states;
  static constexpr bool compact = true;
  static constexpr std::array counters = AdamW::counters;
  DLT_HD void advance(float& step) const { step += 1.0f; }

  template <unsigned states>
  using Element = AdamElement;

  DLT_HD AdamElement at(const PerTensor& tensor, double lr, double grad_factor) const {
    AdamElement element;
    element.adamw = AdamW{beta1, beta2, eps, decoupled_weight_decay ? weight_decay : 0.0}.at(tensor, lr, 1.0);
    element.weight_decay = static_cast<float>(decoupled_weight_decay ? 0.0 : weight_decay);
    element.grad_factor = static_cast<float>(grad_factor);
    return element;
  }
};

}  // namespace dltrain::math
