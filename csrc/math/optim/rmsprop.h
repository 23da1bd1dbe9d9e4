#pragma once

// RMSprop (Hinton, "Neural Networks for Machine Learning", lecture 6e, 2012; centered: Graves, "Generating Sequences With Recurrent Neural
// Networks", 2013), as torch.optim.RMSprop writes it:
//
//   g <- g + wd p
//   v <- a v + (1 - a) g^2              centered: w <- a w + (1 - a) g
//   d = g / (sqrt(v) + eps)             centered: g / (sqrt(v - w^2) + eps)
//   p <- p - lr d                       with momentum: b <- mu b + d,  p <- p - lr b
//
// Others have eps inside of the root (TensorFlow, and Graves), or the learning rate inside of the momentum (TensorFlow).

#include <cmath>

#include "core/host_device.h"
#include "math/optim/decay.h"
#include "math/optim/rule.h"

namespace dltrain::math {

struct RMSpropNumbers {
  float lr, alpha, one_less_alpha, eps, weight_decay, momentum, grad_factor;
};

template <bool has_momentum, bool is_centered>
struct RMSpropElement : RMSpropNumbers {
  RMSpropElement() = default;
  DLT_HD RMSpropElement(const RMSpropNumbers& numbers) : RMSpropNumbers(numbers) {}

  DLT_HD void operator()(float& p, float g, float& v) const {
    const float d = add(p, g, v);
    p -= lr * (d / (sqrtf(v) + eps));
  }

  // state: the momentum buffer or, without momentum, the mean of the gradient.
  DLT_HD void operator()(float& p, float g, float& v, float& state) const {
    const float d = add(p, g, v);
    if constexpr (has_momentum) {
      state = momentum * state + d / (sqrtf(v) + eps);
      p -= lr * state;
    } else {
      p -= lr * (d / deviation(d, v, state));
    }
  }

  DLT_HD void operator()(float& p, float g, float& v, float& b, float& mean) const {
    const float d = add(p, g, v);
    b = momentum * b + d / deviation(d, v, mean);
    p -= lr * b;
  }

 private:
  // Adds the gradient, which it returns with weight decay, to the mean of its square.
  DLT_HD float add(float p, float g, float& v) const {
    const float d = with_decay(g * grad_factor, weight_decay, p);
    v = alpha * v + (one_less_alpha * d) * d;
    return d;
  }

  DLT_HD float deviation(float d, float v, float& mean) const {
    mean = alpha * mean + one_less_alpha * d;
    return sqrtf(v - mean * mean) + eps;
  }
};

struct RMSprop {
  static constexpr const char* name = "rmsprop";

  double alpha = 0.99, eps = 1e-8, weight_decay = 0.0, momentum = 0.0;
  bool centered = false;
  static constexpr auto hyper() {
    return std::tuple{Hyper{"alpha", &RMSprop::alpha}, Hyper{"eps", &RMSprop::eps}, Hyper{"weight_decay", &RMSprop::weight_decay},
                      Hyper{"momentum", &RMSprop::momentum}, Hyper{"centered", &RMSprop::centered}};
  }

  static constexpr std::array states = {State{.key = "square_avg", .nonnegative = true}, State{.key = "momentum_buffer", .optional = true},
                                        State{.key = "grad_avg", .optional = true}};
  DLT_HD bool needs(unsigned k) const { return k == 1 ? momentum != 0.0 : centered; }
  static constexpr std::array counters = {Counter{"step"}};
  DLT_HD void advance(float& step) const { step += 1.0f; }

  template <unsigned states>
  using Element = RMSpropElement<(states & 2) != 0, (states & 4) != 0>;

  DLT_HD RMSpropNumbers at(const PerTensor&, double lr, double grad_factor) const {
    RMSpropNumbers element;
    element.lr = static_cast<float>(lr);
    element.alpha = static_cast<float>(alpha);
    element.one_less_alpha = static_cast<float>(1.0 - alpha);
    element.eps = static_cast<float>(eps);
    element.weight_decay = static_cast<float>(weight_decay);
    element.momentum = static_cast<float>(momentum);
    element.grad_factor = static_cast<float>(grad_factor);
    return element;
  }
};

}  // namespace dltrain::math
