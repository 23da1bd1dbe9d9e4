#pragma once

// Each element is a bfloat16, the upper half of a float, and a block of its own. An element that rounds to 2^128 overflows and becomes NaN.
// The error bounds hold down to 2^-126; below that the error is constant.

#include "core/dtype.h"
#include "math/block.h"

namespace dltrain::math {

struct BF16 {
  static constexpr const char* name = "bf16";
  static constexpr int block = 1;
  static constexpr Statistic statistic = Statistic::none;
  using Word = uint16_t;
  static constexpr int bits = 16;
  static constexpr Bound nearest_error{0x1p-8, 0x1p-8}, stochastic_error{0x1p-7, 0x1p-8};

  DLT_HD static uint32_t nearest(float y) { return overflows(y) ? nan_bits >> 16 : nearest_bfloat16(y); }
  DLT_HD static uint32_t stochastic(float y, uint32_t random) {
    const uint32_t rounded = (magnitude_bits(y) + (random & 0xffff)) >> 16;
    const uint32_t code = (bits_of(y) >> 16 & 0x8000) | (rounded < 0x7f7f ? rounded : 0x7f7f);
    return overflows(y) ? nan_bits >> 16 : code;
  }
  DLT_HD static float value(uint32_t code) { return widen(BFloat16{static_cast<uint16_t>(code)}); }

 private:
  DLT_HD static bool overflows(float y) { return magnitude_bits(y) >= bfloat16_overflow; }
};

}  // namespace dltrain::math
