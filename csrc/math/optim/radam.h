#pragma once

// RAdam (Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", 2020, Algorithm 2), as torch.optim.RAdam writes it:
//
//   g <- g + wd p                             decoupled weight decay: p <- p (1 - lr wd)
//   m <- b1 m + (1 - b1) g                    v <- b2 v + (1 - b2) g^2
//   rho_inf = 2 / (1 - b2) - 1                rho = rho_inf - 2 t b2^t / (1 - b2^t)
//   rho > 5:  p <- p - lr / (1 - b1^t)  m  r sqrt(1 - b2^t) / (sqrt(v) + eps)
//             r = sqrt((rho - 4) (rho - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho))
//   else:     p <- p - lr / (1 - b1^t)  m

#include <cmath>

#include "core/host_device.h"
#include "math/optim/decay.h"
#include "math/optim/moments.h"
#include "math/optim/rule.h"

namespace dltrain::math {

struct RAdamElement {
  float decay;  // 1 - lr wd, where weight decay is decoupled
  float weight_decay, grad_factor;
  Moments moments;
  float step_size;      // lr / (1 - b1^t)
  float rectification;  // r sqrt(1 - b2^t)
  float eps;
  bool is_rectified;

  DLT_HD void operator()(float& p, float g, float& m, float& v) const {
    moments.add(with_decay(g * grad_factor, weight_decay, p), m, v);
    p = p * decay - step_size * m * (is_rectified ? rectification / (sqrtf(v) + eps) : 1.0f);
  }
};

struct RAdam {
  static constexpr const char* name = "radam";

  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
  bool decoupled_weight_decay = false;
  static constexpr auto hyper() {
    return std::tuple{Hyper{"beta1", &RAdam::beta1}, Hyper{"beta2", &RAdam::beta2}, Hyper{"eps", &RAdam::eps},
                      Hyper{"weight_decay", &RAdam::weight_decay}, Hyper{"decoupled_weight_decay", &RAdam::decoupled_weight_decay}};
  }

  static constexpr std::array states = {State{.key = "exp_avg"}, State{.key = "exp_avg_sq", .nonnegative = true}};
  static constexpr std::array counters = {Counter{"step"}};
  DLT_HD void advance(float& step) const { step += 1.0f; }

  template <unsigned states>
  using Element = RAdamElement;

  DLT_HD RAdamElement at(const PerTensor& tensor, double lr, double grad_factor) const {
    const double step = tensor.counters[0], power = pow(beta2, step), correction = 1.0 - power;
    const double longest = 2.0 / (1.0 - beta2) - 1.0, rho = longest - 2.0 * step * power / correction;
    RAdamElement element;
    element.decay = static_cast<float>(decoupled_weight_decay ? 1.0 - lr * weight_decay : 1.0);
    element.weight_decay = static_cast<float>(decoupled_weight_decay ? 0.0 : weight_decay);
    element.grad_factor = static_cast<float>(grad_factor);
    element.moments = Moments::of(beta1, beta2);
    element.step_size = static_cast<float>(lr / (1.0 - pow(beta1, step)));
    element.is_rectified = rho > 5.0;
    const double variance = (rho - 4.0) * (rho - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * rho);
    element.rectification = static_cast<float>(element.is_rectified ? sqrt(variance * correction) : 1.0);
    element.eps = static_cast<float>(eps);
    return element;
  }
};

}  // namespace dltrain::math
