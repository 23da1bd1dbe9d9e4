#pragma once

// Adadelta (Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012, Algorithm 1), as torch.optim.Adadelta writes it:
//
//   g <- g + wd p
//   v <- rho v + (1 - rho) g^2
//   d = sqrt(a + eps) / sqrt(v + eps)  g
//   a <- rho a + (1 - rho) d^2
//   p <- p - lr d

#include <cmath>

#include "core/host_device.h"
#include "math/optim/decay.h"
#include "math/optim/rule.h"

namespace dltrain::math {

struct AdadeltaElement {
  float lr, rho, one_less_rho, eps, weight_decay, grad_factor;

  DLT_HD void operator()(float& p, float g, float& v, float& a) const {
    const float d = with_decay(g * grad_factor, weight_decay, p);
    v = rho * v + (one_less_rho * d) * d;
    const float delta = sqrtf(a + eps) / sqrtf(v + eps) * d;
    a = rho * a + (one_less_rho * delta) * delta;
    p -= lr * delta;
  }
};

struct Adadelta {
  static constexpr const char* name = "adadelta";

  double rho = 0.9, eps = 1e-6, weight_decay = 0.0;
  static constexpr auto hyper() {
    return std::tuple{Hyper{"rho", &Adadelta::rho}, Hyper{"eps", &Adadelta::eps}, Hyper{"weight_decay", &Adadelta::weight_decay}};
  }

  static constexpr std::array states = {State{.key = "square_avg", .nonnegative = true}, State{.key = "acc_delta", .nonnegative = true}};
  static constexpr std::array counters = {Counter{"step"}};
  DLT_HD void advance(float& step) const { step += 1.0f; }

  template <unsigned states>
  using Element = AdadeltaElement;

  DLT_HD AdadeltaElement at(const PerTensor&, double lr, double grad_factor) const {
    AdadeltaElement element;
    element.lr = static_cast<float>(lr);
    element.rho = static_cast<float>(rho);
    element.one_less_rho = static_cast<float>(1.0 - rho);
    element.eps = static_cast<float>(eps);
    element.weight_decay = static_cast<float>(weight_decay);
    element.grad_factor = static_cast<float>(grad_factor);
    return element;
  }
};

}  // namespace dltrain::math
