#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "math/clip.h"

namespace dltrain {

// An operation of map_blocks, of one tile: what becomes of a step whose gradients have this sum of squares. The numbers lie where the
// gradients do; all are written.
struct Judge {
  static constexpr int elements = 256;  // as many as a tile has to have

  const double* sum_squares;
  const double* grad_scale;  // null: 1
  const float* flag;         // not zero: the step is skipped anyway; null: 0
  double max_norm;
  double* divisor;
  float* norm;
  float* found_inf;

  template <class Tile>
  DLT_HD void operator()(Tile& tile) const {
    const double sum = *sum_squares;
    const math::Clip clip = math::clip(sum, grad_scale ? *grad_scale : 1.0, max_norm);
    tile.put(divisor, clip.divisor);
    tile.put(norm, static_cast<float>(clip.norm));
    tile.put(found_inf, (flag && *flag != 0.0f) || sum - sum != 0.0 ? 1.0f : 0.0f);
  }
};

}  // namespace dltrain
