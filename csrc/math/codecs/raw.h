#pragma once

// Each element is an fp32 number, and a block of its own. Nothing is rounded.

#include "math/block.h"

namespace dltrain::math {

struct Raw {
  static constexpr const char* name = "raw";
  static constexpr int block = 1;
  static constexpr Statistic statistic = Statistic::none;
  using Word = uint32_t;
  static constexpr int bits = 32;
  static constexpr Bound nearest_error{0.0, 0.0}, stochastic_error{0.0, 0.0};

  DLT_HD static uint32_t nearest(float y) { return is_finite(y) ? bits_of(y) : nan_bits; }
  DLT_HD static uint32_t stochastic(float y, uint32_t) { return nearest(y); }
  DLT_HD static float value(uint32_t code) { return float_of(code); }
};

}  // namespace dltrain::math
