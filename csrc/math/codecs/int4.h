#pragma once

// 128 elements share an fp32 scale, absmax / 7. A code has four bits, and is the integer plus 8. Byte j of a block holds element j in its
// low half and element j + 64 in its high half.

#include "math/block.h"

namespace dltrain::math {

struct Int4 {
  static constexpr const char* name = "int4";
  static constexpr int block = 128;
  static constexpr Statistic statistic = Statistic::absmax;
  static constexpr float largest = 7.0f;
  using Word = uint8_t;
  static constexpr int bits = 4;
  static constexpr Bound nearest_error{1.0 / 14, 1.0 / 14}, stochastic_error{1.0 / 7, 1.0 / 14};

  // The last bits of the sum are the nearest integer plus 8, since a float of this size has no bits for a fraction.
  DLT_HD static uint32_t nearest(float y) { return bits_of(y + offset) & 0xf; }
  DLT_HD static uint32_t stochastic(float y, uint32_t random) {
    return static_cast<uint32_t>(stochastic_integer(clamped(y, largest), random) + 8);
  }
  DLT_HD static float scaled(uint32_t code, float scale) { return (float_of(0x4b400000 | code) - offset) * scale; }

 private:
  static constexpr float offset = 0x1.8p23f + 8.0f;
};

}  // namespace dltrain::math
