#pragma once

// Clipping by the 2-norm of all gradients (Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent neural networks", 2013,
// Algorithm 1), smoothed as in torch.nn.utils.clip_grad_norm_, of gradients that are still multiplied by `grad_scale`:
//
//   n = sqrt(sum_squares) / grad_scale          g <- g / divisor,   divisor = grad_scale / min(1, max_norm / (n + 1e-6))

#include <cmath>

#include "core/host_device.h"

namespace dltrain::math {

struct Clip {
  double norm, divisor;
};

DLT_HD Clip clip(double sum_squares, double grad_scale, double max_norm) {
  const double norm = sqrt(sum_squares) / grad_scale, factor = max_norm / (norm + 1e-6);
  // The comparison is written so that a norm of NaN makes all gradients NaN.
  return {norm, factor >= 1.0 ? grad_scale : grad_scale / factor};
}

}  // namespace dltrain::math
