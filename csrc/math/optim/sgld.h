#pragma once

// Stochastic gradient Langevin dynamics (Welling & Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", 2011, equation 4),
// for the gradient of a negative log posterior:
//
//   g <- g + wd p
//   p <- p - lr / 2  g + temperature sqrt(lr) z         z is standard normal
//
// z of an element is a function of the seed, the step count, the number of the parameter and the index of the element in the whole tensor.

#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "math/normal.h"
#include "math/optim/decay.h"
#include "math/optim/rule.h"
#include "math/philox.h"

namespace dltrain::math {

struct SGLDElement {
  static constexpr bool is_indexed = true;

  float half_lr, deviation;  // lr / 2, temperature sqrt(lr)
  float weight_decay, grad_factor;
  RandomStream random;

  DLT_HD void operator()(int64_t index, float& p, float g) const {
    const Words words = random.at(index);
    p = p - half_lr * with_decay(g * grad_factor, weight_decay, p) + deviation * normal(words.word[0], words.word[1]);
  }
};

struct SGLD {
  static constexpr const char* name = "sgld";

  double weight_decay = 0.0, temperature = 1.0, seed = 0.0;  // seed: a whole number below 2^53
  static constexpr auto hyper() {
    return std::tuple{Hyper{"weight_decay", &SGLD::weight_decay}, Hyper{"temperature", &SGLD::temperature}, Hyper{"seed", &SGLD::seed}};
  }

  static constexpr std::array<State, 0> states = {};
  static constexpr std::array counters = {Counter{"step"}, Counter{"number"}};
  DLT_HD void advance(float& step, float&) const { step += 1.0f; }

  template <unsigned states>
  using Element = SGLDElement;

  DLT_HD SGLDElement at(const PerTensor& tensor, double lr, double grad_factor) const {
    SGLDElement element;
    element.half_lr = static_cast<float>(0.5 * lr);
    element.deviation = static_cast<float>(temperature * sqrt(lr));
    element.weight_decay = static_cast<float>(weight_decay);
    element.grad_factor = static_cast<float>(grad_factor);
    element.random = {static_cast<uint64_t>(seed), static_cast<uint32_t>(tensor.counters[0]), static_cast<uint32_t>(tensor.counters[1])};
    return element;
  }
};

}  // namespace dltrain::math
