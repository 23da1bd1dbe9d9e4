#pragma once

// For states of optimizers that have a sign. 128 elements share an fp32 scale, absmax. With y = x / absmax the code is the integer next to
// 127 * 2y / (1 + |y|), in two's complement: steps are half as large at 0 as for int8, and twice as large at the ends. This companding is
// that of FlashOptim (2026, arXiv 2602.23349).

#include "math/block.h"

namespace dltrain::math {

struct Softsign8 {
  static constexpr int block = 128;
  static constexpr Statistic statistic = Statistic::absmax;
  static constexpr float largest = 1.0f;
  using Word = uint8_t;
  static constexpr int bits = 8;

  DLT_HD static uint32_t nearest(float y) { return nearest_integer(254.0f * y / (1.0f + float_of(magnitude_bits(y)))) & 0xff; }
  DLT_HD static float scaled(uint32_t code, float scale) {
    const auto c = static_cast<float>(static_cast<int8_t>(code));
    return c / (254.0f - float_of(magnitude_bits(c))) * scale;
  }
};

}  // namespace dltrain::math
