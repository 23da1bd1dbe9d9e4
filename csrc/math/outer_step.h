#pragma once

// The outer step of DiLoCo (Douillard et al., 2023, arXiv 2311.08105): stochastic gradient descent with momentum, where the gradient D is
// the mean over the sites of b - p, and b is what all sites had after the last outer step:
//
//   m <- mu m + D
//   b <- b - lr m                            Nesterov: b <- b - lr (D + mu m)
//   p <- b                                   if the sites have gone on meanwhile: p <- mix p + (1 - mix) b
//
// The last line is that of Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512). An element of D that is not finite changes neither
// m nor b, and one of p that is not finite becomes b.

#include "core/host_device.h"
#include "math/block.h"
#include "math/optim/sgd.h"

namespace dltrain::math {

struct OuterStep {
  float lr = 1.0f, momentum = 0.0f;
  bool nesterov = false;
  float mix = 0.0f;

  DLT_HD float momentum_after(float m, float d) const { return is_finite(d) ? with_momentum(momentum, m, d) : m; }
  // m: after this step.
  DLT_HD float step(float m, float d) const { return is_finite(d) ? lr * direction_of(momentum, nesterov, m, d) : 0.0f; }
  DLT_HD float mixed(float p, float b) const { return is_finite(p) ? mix * p + (1.0f - mix) * b : b; }
};

}  // namespace dltrain::math
