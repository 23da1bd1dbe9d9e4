#pragma once

// Each element is an IEEE 754 half, and a block of its own. An element that rounds to 2^16 or more overflows and becomes NaN.
// The error bounds hold down to 2^-14; below that the error is constant.

#include "core/dtype.h"
#include "math/block.h"

namespace dltrain::math {

struct FP16 {
  static constexpr const char* name = "fp16";
  static constexpr int block = 1;
  static constexpr Statistic statistic = Statistic::none;
  using Word = uint16_t;
  static constexpr int bits = 16;
  static constexpr Bound nearest_error{0x1p-11, 0x1p-11}, stochastic_error{0x1p-10, 0x1p-11};

  DLT_HD static uint32_t nearest(float y) { return code(y, nearest_half(magnitude_bits(y))); }
  DLT_HD static uint32_t stochastic(float y, uint32_t random) {
    const uint32_t magnitude = magnitude_bits(y);
    const uint32_t normal = (magnitude + (random & 0x1fff) - first_normal) >> 13;
    const auto denormal =
        static_cast<uint32_t>(stochastic_integer(float_of(magnitude < smallest_normal ? magnitude : smallest_normal) * 0x1p24f, random));
    const uint32_t capped = normal < 0x7bff ? normal : 0x7bff;
    return code(y, select(magnitude < smallest_normal, denormal, capped));
  }
  DLT_HD static float value(uint32_t code) { return widen(Half{static_cast<uint16_t>(code)}); }

 private:
  static constexpr uint32_t first_normal = (127 - 15) << 23, smallest_normal = (127 - 14) << 23;

  DLT_HD static uint32_t code(float y, uint32_t magnitude) {
    return select(magnitude_bits(y) < half_overflow, (bits_of(y) >> 16 & 0x8000) | magnitude, 0x7e00);
  }
};

}  // namespace dltrain::math
