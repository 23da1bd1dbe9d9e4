#pragma once

// LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020, Algorithm 2): AdamW's direction, with
// a step as long as the tensor.
//
//   m <- b1 m + (1 - b1) g              v <- b2 v + (1 - b2) g^2
//   u = m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps) + wd p
//   p <- p - lr r u                     r = |p| / |u|; 1 where a norm is zero, and for tensors without a trust ratio

#include <cmath>
#include <type_traits>

#include "core/host_device.h"
#include "math/optim/decay.h"
#include "math/optim/moments.h"
#include "math/optim/rule.h"

namespace dltrain::math {

struct LAMBElement {
  Moments moments;
  float correction1, correction2;  // 1 / (1 - b1^t), 1 / sqrt(1 - b2^t)
  float eps, weight_decay, grad_factor;
  float step_size;  // lr r

  DLT_HD void operator()(float& p, float g, float& m, float& v) const { p -= step_size * direction(p, g, m, v); }

  DLT_HD float direction(float p, float g, float& m, float& v) const {
    moments.add(g * grad_factor, m, v);
    return with_decay(m * correction1 / (sqrtf(v) * correction2 + eps), weight_decay, p);
  }
};

struct LAMB {
  static constexpr const char* name = "lamb";

  double beta1 = 0.9, beta2 = 0.999, eps = 1e-6, weight_decay = 1e-2;
  static constexpr auto hyper() {
    return std::tuple{Hyper{"beta1", &LAMB::beta1}, Hyper{"beta2", &LAMB::beta2}, Hyper{"eps", &LAMB::eps},
                      Hyper{"weight_decay", &LAMB::weight_decay}};
  }

  static constexpr std::array states = {State{.key = "exp_avg", .coded = true},
                                        State{.key = "exp_avg_sq", .nonnegative = true, .coded = true}};
  static constexpr bool compact = true;
  static constexpr std::array counters = {Counter{"step"}};
  DLT_HD void advance(float& step) const { step += 1.0f; }

  static constexpr int norms = 2;  // of the parameter and the direction
  struct Measure {
    LAMBElement element;
    DLT_HD float operator()(std::integral_constant<int, 0>, float p, float, float, float) const { return p; }
    DLT_HD float operator()(std::integral_constant<int, 1>, float p, float g, float m, float v) const {
      return element.direction(p, g, m, v);
    }
  };
  DLT_HD Measure measure(const PerTensor& tensor, double grad_factor) const { return {at(tensor, 1.0, grad_factor)}; }
  static constexpr Flag flag = {"adapt", true};  // the tensor has a trust ratio

  template <unsigned states>
  using Element = LAMBElement;

  DLT_HD LAMBElement at(const PerTensor& tensor, double lr, double grad_factor) const {
    const double step = tensor.counters[0], norm = sqrt(tensor.sums[0]), length = sqrt(tensor.sums[1]);
    LAMBElement element;
    element.moments = Moments::of(beta1, beta2);
    element.correction1 = static_cast<float>(1.0 / (1.0 - pow(beta1, step)));
    element.correction2 = static_cast<float>(1.0 / sqrt(1.0 - pow(beta2, step)));
    element.eps = static_cast<float>(eps);
    element.weight_decay = static_cast<float>(weight_decay);
    element.grad_factor = static_cast<float>(grad_factor);
    element.step_size = static_cast<float>(tensor.flag && norm != 0.0 && length != 0.0 ? lr * (norm / length) : lr);
    return element;
  }
};

}  // namespace dltrain::math
