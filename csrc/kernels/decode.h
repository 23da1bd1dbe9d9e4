#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/coding.h"
#include "kernels/message.h"
#include "kernels/tile.h"
#include "math/sum_squares.h"

namespace dltrain {

// An operation of map_blocks: values <- what the message stands for, and sums <- the sum of squares of each tile's values.
template <class C>
struct Decode {
  static constexpr int elements = MessageLayout<C>::tile;
  static constexpr bool in_lists = true;

  int64_t numel;
  const uint8_t* message;
  TypedPointer values;
  double* sums;       // where wanted
  bool non_temporal;  // the values are more than a cache holds

  DLT_HD void operator()(Tile auto& tile) const {
    decode<C>(tile, message, numel, [](float, float x) DLT_HD_LAMBDA { return x; });
    with_type(values, [&](auto* to) DLT_HD_LAMBDA {
      // The sum is one of what is stored: a narrower type may make an infinity of a value.
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

// An operation of map_blocks: the sums of 256 numbers each. Where found_inf is given there is one sum, and it becomes 1 if that is not
// finite, else 0. (In double: no square of a float overflows, so a sum of squares is finite exactly if all elements are.)
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
