#pragma once

// Stochastic gradient descent with momentum (Polyak, 1964; Nesterov, 1983; Sutskever, Martens, Dahl & Hinton, 2013), as torch.optim.SGD
// writes it, with the learning rate outside of the momentum:
//
//   d <- s (g + wd p)                        s = 1 - tau; at a parameter's first step, and without momentum, s = 1
//   b <- mu b + d                            at a parameter's first step: b <- d
//   p <- p - lr b                            Nesterov (which torch allows where tau = 0): p <- p - lr (d + mu b)
//
// Without momentum p <- p - lr d.

#include "core/host_device.h"
#include "math/optim/decay.h"
#include "math/optim/rule.h"

namespace dltrain::math {

// The momentum after a gradient d, and the direction of the step.
DLT_HD float with_momentum(float mu, float b, float d) { return mu * b + d; }
DLT_HD float direction_of(float mu, bool nesterov, float b, float d) { return nesterov ? d + mu * b : b; }

struct SGDElement {
  float lr, momentum, weight_decay, grad_factor;
  float share;  // s
  bool nesterov, first;

  DLT_HD void operator()(float& p, float g) const { p -= lr * direction(p, g); }

  DLT_HD void operator()(float& p, float g, float& b) const {
    const float d = direction(p, g);
    b = first ? d : with_momentum(momentum, b, d);
    p -= lr * direction_of(momentum, nesterov, b, d);
  }

 private:
  DLT_HD float direction(float p, float g) const { return share * with_decay(g * grad_factor, weight_decay, p); }
};

struct SGD {
  static constexpr const char* name = "sgd";

  double momentum = 0.0, dampening = 0.0, weight_decay = 0.0;
  bool nesterov = false;
  static constexpr auto hyper() {
    return std::tuple{Hyper{"momentum", &SGD::momentum}, Hyper{"dampening", &SGD::dampening}, Hyper{"weight_decay", &SGD::weight_decay},
                      Hyper{"nesterov", &SGD::nesterov}};
  }

  static constexpr std::array states = {State{.key = "momentum_buffer", .optional = true, .coded = true}};
  static constexpr bool compact = true;
  bool needs(unsigned) const { return momentum != 0.0; }
  static constexpr Flag flag = {"first"};  // the buffer is not initialized yet

  template <unsigned states>
  using Element = SGDElement;

  DLT_HD SGDElement at(const PerTensor& tensor, double lr, double grad_factor) const { return at(tensor.flag, lr, grad_factor); }
  DLT_HD SGDElement at(bool first, double lr, double grad_factor) const {
    SGDElement element;
    element.lr = static_cast<float>(lr);
    element.momentum = static_cast<float>(momentum);
    element.weight_decay = static_cast<float>(weight_decay);
    element.grad_factor = static_cast<float>(grad_factor);
    element.share = static_cast<float>(first || momentum == 0.0 ? 1.0 : 1.0 - dampening);
    element.nesterov = nesterov;
    element.first = first;
    return element;
  }
};

}  // namespace dltrain::math
