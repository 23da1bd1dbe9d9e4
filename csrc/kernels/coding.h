#pragma once

// Decodes a message into a tile, and encodes a tile into a message, for map_blocks and for for_each.

#include <cstdint>

#include "kernels/message.h"
#include "kernels/tile.h"
#include "math/block.h"
#include "math/philox.h"

namespace dltrain {

// How values are rounded to codes: to nearest, or stochastically with these random numbers.
struct Rounding {
  bool stochastic = false;
  math::RandomStream random;
  int64_t first = 0;  // index of the message's first element in the rank's tensor; a multiple of 4
};

// value <- f(value, x) for each element of the tile, where x is this element decoded from the message.
template <class C, class F>
DLT_HD void decode(Tile auto& tile, const uint8_t* message, int64_t numel, F f) {
  using Layout = MessageLayout<C>;
  const float scale = Layout::scaled ? *Layout::scale_at(message, tile.index()) : 1.0f;
  tile.template decode<C>(Layout::words_at(message, numel, tile.index()), {scale}, f);
}

// One element of a message whose words hold one code each.
template <class C>
DLT_HD float decoded_at(const uint8_t* message, int64_t numel, int64_t index) {
  using Layout = MessageLayout<C>;
  static_assert(Layout::scaled && Layout::codes == 1);
  return math::decoded<C>(Layout::words_at(message, numel, 0)[index], *Layout::scale_at(message, index / Layout::tile));
}

// The statistic of codec C over the values of the tile.
template <class C>
DLT_HD float statistic(const Tile auto& tile, bool stochastic) {
  if (C::statistic == math::Statistic::absmax || stochastic) return float_of(tile.largest_magnitude());
  const float sum = tile.template sum<float>([](int64_t, float x) DLT_HD_LAMBDA { return float_of(math::magnitude_bits(x)); });
  const auto count = static_cast<float>(tile.count());
  if (math::is_finite(sum)) return sum / count;
  // The magnitudes are divided before they are added, so the sum of finite ones can only overflow by rounding.
  const float mean = tile.template sum<float>([=](int64_t, float x) DLT_HD_LAMBDA { return float_of(math::magnitude_bits(x)) / count; });
  return math::is_finite(float_of(tile.largest_magnitude())) && !math::is_finite(mean) ? math::largest_float : mean;
}

// Encodes the values of the tile into its part of the message. non_temporal: the message is larger than the cache.
template <class C>
DLT_HD math::Scale encode(Tile auto& tile, uint8_t* message, int64_t numel, const Rounding& rounding = {}, bool non_temporal = false) {
  using Layout = MessageLayout<C>;
  math::Scale found{1.0f, 1.0f};
  constexpr bool may_be_stochastic = requires { C::stochastic_error; };
  if constexpr (Layout::scaled) {
    found = math::scale_of(statistic<C>(tile, may_be_stochastic && rounding.stochastic), C::largest);
    tile.put(Layout::scale_at(message, tile.index()), found.decode);
  }
  auto* words = Layout::words_at(message, numel, tile.index());
  if (!math::is_finite(found.decode)) {
    tile.template encode<C>(words, non_temporal, [](float, uint32_t) DLT_HD_LAMBDA { return 0u; });
    return found;
  }
  if constexpr (may_be_stochastic) {
    if (rounding.stochastic) {
      if constexpr (C::stochastic_error.max > 0.0) tile.randomize(rounding.random, rounding.first);
      tile.template encode<C>(words, non_temporal,
                              [=](float x, uint32_t word) DLT_HD_LAMBDA { return C::stochastic(x * found.encode, word); });
      return found;
    }
  }
  tile.template encode<C>(words, non_temporal, math::Nearest<C>{found.encode});
  return found;
}

}  // namespace dltrain
