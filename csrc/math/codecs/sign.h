#pragma once

// 256 elements share an fp32 scale m, their mean magnitude. A code is one bit, which is set if the element is negative (Seide et al.,
// "1-bit Stochastic Gradient Descent", 2014; with the mean: Karimireddy et al., "Error Feedback Fixes SignSGD", 2019). Bit b of byte j of a
// block is element j + 32 b. Rounding to nearest is biased, and meant for error feedback. Stochastic rounding is unbiased: m is then
// absmax, and x becomes m with probability (1 + x / m) / 2, else -m.

#include "math/block.h"

namespace dltrain::math {

struct Sign {
  static constexpr const char* name = "sign";
  static constexpr int block = 256;
  static constexpr Statistic statistic = Statistic::mean;
  static constexpr float largest = 1.0f;
  using Word = uint8_t;
  static constexpr int bits = 1;
  static constexpr Bound nearest_error{1.0, 0.5}, stochastic_error{2.0, 1.0};

  DLT_HD static uint32_t nearest(float y) { return bits_of(y) >> 31; }
  DLT_HD static uint32_t stochastic(float y, uint32_t random) { return uniform(random) < 0.5f - 0.5f * clamped(y, largest) ? 1 : 0; }
  DLT_HD static float scaled(uint32_t code, float scale) { return float_of(bits_of(scale) | code << 31); }
};

}  // namespace dltrain::math
