#pragma once

// Layer-wise adaptive rate scaling, in variants that differ as soon as the learning rate changes:
//
//   r = eta |w| / (|g| + wd |w| + eps)                          the trust ratio of a tensor; 1 where |w| or |g| is zero
//
//   learning rate inside of the momentum                        outside
//     b <- mu b + lr r (g + wd w)                                 b <- mu b + r (g + wd w)
//     w <- w - b                                                  w <- w - lr b
//
// You, Gitman & Ginsburg, "Large Batch Training of Convolutional Networks", 2017, Algorithm 1, and the optimizer of TensorFlow and MLPerf
// have it inside. apex's LARC has it outside, with min(r / lr, 1) instead of r. Both are an SGD step with different factors.

#include <cmath>
#include <type_traits>

#include "core/host_device.h"
#include "math/optim/rule.h"
#include "math/optim/sgd.h"

namespace dltrain::math {

struct LARS {
  static constexpr const char* name = "lars";

  double momentum = 0.9, weight_decay = 0.0, trust_coefficient = 1e-3, eps = 0.0;
  bool nesterov = false;
  bool lr_inside = true;
  bool clip = false;            // r <- min(r / lr, 1)
  bool decays_excluded = true;  // whether weight decay also applies to tensors without a trust ratio
  bool decays_at_zero_norm = true;
  static constexpr auto hyper() {
    return std::tuple{Hyper{"momentum", &LARS::momentum},
                      Hyper{"weight_decay", &LARS::weight_decay},
                      Hyper{"trust_coefficient", &LARS::trust_coefficient},
                      Hyper{"eps", &LARS::eps},
                      Hyper{"nesterov", &LARS::nesterov},
                      Hyper{"lr_inside", &LARS::lr_inside},
                      Hyper{"clip", &LARS::clip},
                      Hyper{"decays_excluded", &LARS::decays_excluded},
                      Hyper{"decays_at_zero_norm", &LARS::decays_at_zero_norm}};
  }

  static constexpr std::array states = {State{.key = "momentum_buffer", .optional = true}};
  bool needs(unsigned) const { return momentum != 0.0; }
  static constexpr int norms = 2;  // of the parameter and the gradient
  struct Measure {
    template <class... States>
    DLT_HD float operator()(std::integral_constant<int, 0>, float param, float, const States&...) const {
      return param;
    }
    template <class... States>
    DLT_HD float operator()(std::integral_constant<int, 1>, float, float grad, const States&...) const {
      return grad;
    }
  };
  DLT_HD Measure measure(const PerTensor&, double) const { return {}; }
  static constexpr Flag flag = {"adapt", true};  // the tensor has a trust ratio

  template <unsigned states>
  using Element = SGDElement;

  DLT_HD SGDElement at(const PerTensor& tensor, double lr, double grad_factor) const {
    return tensor.flag ? adapted(tensor.sums[0], tensor.sums[1], lr, grad_factor) : excluded(lr, grad_factor);
  }

  // The element function of a tensor without a trust ratio.
  DLT_HD SGDElement excluded(double lr, double grad_factor) const { return element(1.0, decays_excluded, lr, grad_factor); }

  // The element function of a tensor with these sums of squares of its elements and of its gradient.
  DLT_HD SGDElement adapted(double sum_squares, double grad_sum_squares, double lr, double grad_factor) const {
    const double norm = sqrt(sum_squares), grad_norm = sqrt(grad_sum_squares) * fabs(grad_factor);
    if (norm == 0.0 || grad_norm == 0.0) return element(1.0, decays_at_zero_norm, lr, grad_factor);
    const double ratio = trust_coefficient * norm / (grad_norm + weight_decay * norm + eps);
    return element(clip ? fmin(ratio / lr, 1.0) : ratio, true, lr, grad_factor);
  }

 private:
  DLT_HD SGDElement element(double ratio, bool decays, double lr, double grad_factor) const {
    SGDElement element = SGD{momentum, 0.0, decays ? weight_decay : 0.0, nesterov}.at(false, lr_inside ? 1.0 : lr, grad_factor);
    element.share = static_cast<float>(lr_inside ? lr * ratio : ratio);
    return element;
  }
};

}  // namespace dltrain::math
