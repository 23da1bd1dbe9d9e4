#pragma once

// AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019, Algorithm 2), with bias correction as in torch.optim.AdamW:
//
//   p <- p (1 - lr wd)
//   m <- b1 m + (1 - b1) g              v <- b2 v + (1 - b2) g^2
//   p <- p - lr / (1 - b1^t)  m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//
// AMSGrad (Reddi, Kale & Kumar, 2018) replaces v in the last line by the largest v so far.

#include <cmath>

#include "core/host_device.h"
#include "math/optim/moments.h"
#include "math/optim/rule.h"

namespace dltrain::math {

// What one step does to one element.
struct AdamWElement {
  float decay;  // 1 - lr wd
  Moments moments;
  float step_size;   // lr / (1 - b1^t)
  float correction;  // 1 / sqrt(1 - b2^t)
  float eps;
  float grad_factor;

  DLT_HD void operator()(float& p, float g, float& m, float& v) const {
    moments.add(g * grad_factor, m, v);
    p = moved(p, m, v);
  }

  DLT_HD void operator()(float& p, float g, float& m, float& v, float& max_v) const {
    moments.add(g * grad_factor, m, v);
    // The comparison is written so that max_v becomes NaN if v is NaN.
    max_v = max_v > v ? max_v : v;
    p = moved(p, m, max_v);
  }

 private:
  DLT_HD float moved(float p, float m, float v) const { return p * decay - step_size * (m / (sqrtf(v) * correction + eps)); }
};

// Terms that depend on the step count are computed in double, once per tensor.
struct AdamW {
  static constexpr const char* name = "adamw";

  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 1e-2;
  static constexpr auto hyper() {
    return std::tuple{Hyper{"beta1", &AdamW::beta1}, Hyper{"beta2", &AdamW::beta2}, Hyper{"eps", &AdamW::eps},
                      Hyper{"weight_decay", &AdamW::weight_decay}};
  }

  static constexpr std::array states = {State{.key = "exp_avg", .coded = true},
                                        State{.key = "exp_avg_sq", .nonnegative = true, .coded = true},
                                        State{.key = "max_exp_avg_sq", .optional = true, .nonnegative = true}};
  static constexpr bool compact = true;
  static constexpr std::array counters = {Counter{"step"}};
  DLT_HD void advance(float& step) const { step += 1.0f; }

  template <unsigned states>
  using Element = AdamWElement;

  DLT_HD AdamWElement at(const PerTensor& tensor, double lr, double grad_factor) const {
    const double step = tensor.counters[0];
    AdamWElement element;
    element.decay = static_cast<float>(1.0 - lr * weight_decay);
    element.moments = Moments::of(beta1, beta2);
    element.step_size = static_cast<float>(lr / (1.0 - pow(beta1, step)));
    element.correction = static_cast<float>(1.0 / sqrt(1.0 - pow(beta2, step)));
    element.eps = static_cast<float>(eps);
    element.grad_factor = static_cast<float>(grad_factor);
    return element;
  }
};

}  // namespace dltrain::math
