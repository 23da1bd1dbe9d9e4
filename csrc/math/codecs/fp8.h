#pragma once

// 128 elements share an fp32 scale, absmax / 448. Each element is a float of 1 + 4 + 3 bits, e4m3fn (Micikevicius et al., "FP8 Formats for
// Deep Learning", 2022): 2^(e - 7) 1.mmm or, if e is 0, 2^-6 0.mmm.
//
// The error is at most 2^-4 (stochastic 2^-3) of the element, down to elements of absmax 2^-6 / 448; below that it is constant.

#include "math/block.h"

namespace dltrain::math {

struct FP8 {
  static constexpr const char* name = "fp8";
  static constexpr int block = 128;
  static constexpr Statistic statistic = Statistic::absmax;
  static constexpr float largest = 448.0f;
  using Word = uint8_t;
  static constexpr int bits = 8;
  static constexpr Bound nearest_error{1.0 / 28, 1.0 / 28}, stochastic_error{1.0 / 14, 1.0 / 28};

  DLT_HD static uint32_t nearest(float y) {
    const uint32_t magnitude = magnitude_bits(y);
    const uint32_t normal = (magnitude + 0x7ffff + ((magnitude >> 20) & 1) - first_normal) >> 20;
    // Below 2^-6 the unit in the last place is 2^-9, which is also that of the floats in [2^14, 2^15).
    const uint32_t denormal = bits_of(float_of(magnitude) + 0x1p14f) - 0x46800000;
    return sign(y) | (magnitude < smallest_normal ? denormal : normal);
  }
  DLT_HD static uint32_t stochastic(float y, uint32_t random) {
    const uint32_t magnitude = magnitude_bits(clamped(y, largest));
    const uint32_t normal = (magnitude + (random & 0xfffff) - first_normal) >> 20;
    const auto denormal =
        static_cast<uint32_t>(stochastic_integer(float_of(magnitude < smallest_normal ? magnitude : smallest_normal) * 0x1p9f, random));
    return sign(y) | select(magnitude < smallest_normal, denormal, normal);
  }
  // The code 0x7f is NaN; the encoder never writes it.
  DLT_HD static float scaled(uint32_t code, float scale) {
    return float_of(select((code & 0x7f) == 0x7f, nan_bits, bits_of(value(code) * scale)));
  }
  DLT_HD static float value(uint32_t code) {
    const uint32_t magnitude = code & 0x7f;
    const uint32_t denormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
    return float_of((code & 0x80) << 24 | (magnitude < 8 ? denormal : (magnitude << 20) + first_normal));
  }

 private:
  static constexpr uint32_t first_normal = (127 - 7) << 23, smallest_normal = (127 - 6) << 23;

  DLT_HD static uint32_t sign(float y) { return (bits_of(y) >> 24) & 0x80; }
};

}  // namespace dltrain::math
