#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/coding.h"
#include "kernels/message.h"
#include "kernels/tile.h"
#include "math/sum_squares.h"

namespace dltrain {

// An operation of map_blocks. It writes the decoded message to `values`, and the sum of squares of each tile's values to `sums`.
template <class C>
struct Decode {
  static constexpr int elements = MessageLayout<C>::tile;
  static constexpr bool in_lists = true;

  int64_t numel;
  const uint8_t* message;
  TypedPointer values;
  double* sums;       // one per tile; may be null
  bool non_temporal;  // the values are larger than the cache

  DLT_HD void operator()(Tile auto& tile) const {
    decode<C>(tile, message, numel, [](float, float x) DLT_HD_LAMBDA { return x; });
    with_type(values, [&](auto* to) DLT_HD_LAMBDA {
      // The sum is taken of the stored values: rounding to a narrower type may make a value infinite.
      tile.round(to);
      if (non_temporal) {
        tile.stream(to);
      } else {
        tile.store(to, [](float value, float) DLT_HD_LAMBDA { return value; });
      }
    });
    if (!sums) return;
    tile.put(sums + tile.index(),
             tile.template sum<double>([](int64_t, float x) DLT_HD_LAMBDA { return static_cast<double>(x) * static_cast<double>(x); }));
  }
};

// An operation of map_blocks: adds up 256 numbers at a time. If found_inf is given, there is only one sum, and *found_inf becomes 1 if it
// is not finite, else 0. (In double no square of a float overflows, so a sum of squares is finite exactly if all elements are.)
struct SumTiles {
  static constexpr int elements = 256;

  const double* from;
  int64_t count;
  double* to;
  float* found_inf;

  DLT_HD void operator()(Tile auto& tile) const {
    const double sum =
        tile.template sum<double>([numbers = from, end = count](int64_t i, float) DLT_HD_LAMBDA { return i < end ? numbers[i] : 0.0; });
    tile.put(to + tile.index(), sum);
    if (found_inf) tile.put(found_inf, math::SumSquares::all_finite(sum) ? 0.0f : 1.0f);
  }
};

}  // namespace dltrain
