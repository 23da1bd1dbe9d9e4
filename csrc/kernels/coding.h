#pragma once

// The elements of a tile, as map_blocks and for_each hold them, out of a message and into one.

#include <cstdint>

#include "kernels/message.h"
#include "kernels/tile.h"
#include "math/block.h"
#include "math/philox.h"

namespace dltrain {

// To nearest, unless it is stochastic.
struct Rounding {
  bool stochastic = false;
  math::RandomStream random;
  int64_t first = 0;  // where in the rank's tensor the message's elements begin; a multiple of 4
};

// value <- f(value, x), for each x of the elements that the message has of this tile.
template <class C, class F>
DLT_HD void decode(Tile auto& tile, const uint8_t* message, int64_t numel, F f) {
  using Layout = MessageLayout<C>;
  const float scale = Layout::scaled ? *Layout::scale_at(message, tile.index()) : 1.0f;
  tile.template decode<C>(Layout::words_at(message, numel, tile.index()),
                          [=](float value, uint32_t code) DLT_HD_LAMBDA { return f(value, math::decoded<C>(code, scale)); });
}

// The statistic of a codec, of what the tile holds.
template <class C>
DLT_HD float statistic(const Tile auto& tile, bool stochastic) {
  if (C::statistic == math::Statistic::absmax || stochastic) return float_of(tile.largest_magnitude());
  const float sum = tile.template sum<float>([](int64_t, float x) DLT_HD_LAMBDA { return float_of(math::magnitude_bits(x)); });
  const auto count = static_cast<float>(tile.count());
  if (math::is_finite(sum)) return sum / count;
  // Divided before they are added, so that the sum of finite ones is finite.
  const float mean = tile.template sum<float>([=](int64_t, float x) DLT_HD_LAMBDA { return float_of(math::magnitude_bits(x)) / count; });
  return math::is_finite(float_of(tile.largest_magnitude())) && !math::is_finite(mean) ? math::largest_float : mean;
}

// The tile's place in the message <- its values. non_temporal: the message is more than a cache holds.
template <class C>
DLT_HD math::Scale encode(Tile auto& tile, uint8_t* message, int64_t numel, const Rounding& rounding = {}, bool non_temporal = false) {
  using Layout = MessageLayout<C>;
  math::Scale found{1.0f, 1.0f};
  if constexpr (Layout::scaled) {
    found = math::scale_of(statistic<C>(tile, rounding.stochastic), C::largest);
    tile.put(Layout::scale_at(message, tile.index()), found.decode);
  }
  auto* words = Layout::words_at(message, numel, tile.index());
  if (!math::is_finite(found.decode)) {
    tile.template encode<C>(words, non_temporal, [](float, uint32_t) DLT_HD_LAMBDA { return 0u; });
  } else if (rounding.stochastic) {
    if constexpr (C::stochastic_error.max > 0.0) tile.randomize(rounding.random, rounding.first);
    tile.template encode<C>(words, non_temporal,
                            [=](float x, uint32_t word) DLT_HD_LAMBDA { return C::stochastic(x * found.encode, word); });
  } else {
    // Where the statistic is the mean, a code is a sign and needs no scale.
    const auto nearest = [=](float x, uint32_t) DLT_HD_LAMBDA {
      if constexpr (C::statistic == math::Statistic::mean) return C::nearest(x);
      return C::nearest(x * found.encode);
    };
    tile.template encode<C>(words, non_temporal, nearest);
  }
  return found;
}

}  // namespace dltrain
