#pragma once

// Each element is a bfloat16, the upper half of a float, and a block of its own. One that rounds to 2^128 is an overflow: NaN.
//
//   error relative to the element     nearest  2^-9     stochastic  2^-8, rms 2^-9; from 2^-126 on, constant below

#include "core/dtype.h"
#include "math/block.h"

namespace dltrain::math {

struct BF16 {
  static constexpr const char* name = "bf16";
  static constexpr int block = 1;
  static constexpr Statistic statistic = Statistic::none;
  using Unit = uint16_t;
  static constexpr int bits = 16;

  DLT_HD static uint32_t nearest(float y) {
    const uint32_t code = (bits_of(y) + 0x7fff + ((bits_of(y) >> 16) & 1)) >> 16;
    return overflows(y) ? nan_bits >> 16 : code;
  }
  DLT_HD static uint32_t stochastic(float y, uint32_t random) {
    const uint32_t rounded = (magnitude_bits(y) + (random & 0xffff)) >> 16;
    const uint32_t code = (bits_of(y) >> 16 & 0x8000) | (rounded < 0x7f7f ? rounded : 0x7f7f);
    return overflows(y) ? nan_bits >> 16 : code;
  }
  DLT_HD static float value(uint32_t code) { return float_of(code << 16); }

 private:
  DLT_HD static bool overflows(float y) { return magnitude_bits(y) >= 0x7f7f8000; }
};

}  // namespace dltrain::math
