#pragma once

// NAdam (Dozat, "Incorporating Nesterov Momentum into Adam", 2016), as torch.optim.NAdam writes it, with a momentum that grows:
//
//   g <- g + wd p                             decoupled weight decay: p <- p (1 - lr wd)
//   mu_t = b1 (1 - 0.96^(t decay) / 2)        M_t = mu_1 mu_2 ... mu_t
//   m <- b1 m + (1 - b1) g                    v <- b2 v + (1 - b2) g^2
//   p <- p - lr ((1 - mu_t) / (1 - M_t) g + mu_{t+1} / (1 - M_{t+1}) m) / (sqrt(v) / sqrt(1 - b2^t) + eps)

#include <cmath>

#include "core/host_device.h"
#include "math/optim/decay.h"
#include "math/optim/moments.h"
#include "math/optim/rule.h"

namespace dltrain::math {

struct NAdamElement {
  float decay;  // 1 - lr wd, where weight decay is decoupled
  float weight_decay, grad_factor;
  Moments moments;
  float grad_step;      // lr (1 - mu_t) / (1 - M_t)
  float momentum_step;  // lr mu_{t+1} / (1 - M_{t+1})
  float correction;     // 1 / sqrt(1 - b2^t)
  float eps;

  DLT_HD void operator()(float& p, float g, float& m, float& v) const {
    const float d = with_decay(g * grad_factor, weight_decay, p);
    moments.add(d, m, v);
    p = p * decay - (grad_step * d + momentum_step * m) / (sqrtf(v) * correction + eps);
  }
};

struct NAdam {
  static constexpr const char* name = "nadam";

  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0, momentum_decay = 4e-3;
  bool decoupled_weight_decay = false;
  static constexpr auto hyper() {
    return std::tuple{Hyper{"beta1", &NAdam::beta1},
                      Hyper{"beta2", &NAdam::beta2},
                      Hyper{"eps", &NAdam::eps},
                      Hyper{"weight_decay", &NAdam::weight_decay},
                      Hyper{"momentum_decay", &NAdam::momentum_decay},
                      Hyper{"decoupled_weight_decay", &NAdam::decoupled_weight_decay}};
  }

  static constexpr std::array states = {State{.key = "exp_avg"}, State{.key = "exp_avg_sq", .nonnegative = true}};
  static constexpr std::array counters = {Counter{"step"}, Counter{"mu_product", 1.0f}};
  DLT_HD void advance(float& step, float& mu_product) const {
    step += 1.0f;
    mu_product *= static_cast<float>(mu(step));
  }

  template <unsigned states>
  using Element = NAdamElement;

  DLT_HD NAdamElement at(const PerTensor& tensor, double lr, double grad_factor) const {
    const double step = tensor.counters[0], mu_product = tensor.counters[1], next = mu(step + 1.0);
    NAdamElement element;
    element.decay = static_cast<float>(decoupled_weight_decay ? 1.0 - lr * weight_decay : 1.0);
    element.weight_decay = static_cast<float>(decoupled_weight_decay ? 0.0 : weight_decay);
    element.grad_factor = static_cast<float>(grad_factor);
    element.moments = Moments::of(beta1, beta2);
    element.grad_step = static_cast<float>(lr * (1.0 - mu(step)) / (1.0 - mu_product));
    element.momentum_step = static_cast<float>(lr * next / (1.0 - mu_product * next));
    element.correction = static_cast<float>(1.0 / sqrt(1.0 - pow(beta2, step)));
    element.eps = static_cast<float>(eps);
    return element;
  }

 private:
  DLT_HD double mu(double step) const { return beta1 * (1.0 - 0.5 * pow(0.96, step * momentum_decay)); }
};

}  // namespace dltrain::math
