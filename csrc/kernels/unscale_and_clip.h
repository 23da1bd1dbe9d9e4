#pragma once

#include "core/host_device.h"
#include "kernels/scalars.h"
#include "kernels/tile.h"
#include "math/clip.h"
#include "math/sum_squares.h"

namespace dltrain {

// An operation of map_blocks over one tile. From the sum of squares of the gradients and the scalars of a step, it writes the divisor of
// the gradients, their norm, and found_inf, which is 1 if the step is not taken. All numbers are in memory of the gradients' device.
struct UnscaleAndClip {
  static constexpr int elements = 256;  // of a tile; the operation uses none of them

  const double* sum_squares;
  Scalars scalars;
  double max_norm;
  double* divisor;
  float* norm;
  float* found_inf;

  DLT_HD void operator()(Tile auto& tile) const {
    const math::Clip clip = math::clip(*sum_squares, scalars.scale(), max_norm);
    tile.put(divisor, clip.divisor);
    tile.put(norm, static_cast<float>(clip.norm));
    tile.put(found_inf, scalars.skip() || !math::SumSquares::all_finite(*sum_squares) ? 1.0f : 0.0f);
  }
};

}  // namespace dltrain
