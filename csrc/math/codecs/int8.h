#pragma once

// 256 elements share an fp32 scale, absmax / 127. A code is a byte in two's complement.

#include "math/block.h"

namespace dltrain::math {

struct Int8 {
  static constexpr const char* name = "int8";
  static constexpr int block = 256;
  static constexpr Statistic statistic = Statistic::absmax;
  static constexpr float largest = 127.0f;
  using Word = uint8_t;
  static constexpr int bits = 8;
  static constexpr Bound nearest_error{1.0 / 254, 1.0 / 254}, stochastic_error{1.0 / 127, 1.0 / 254};

  DLT_HD static uint32_t nearest(float y) { return nearest_integer(y) & 0xff; }
  DLT_HD static uint32_t stochastic(float y, uint32_t random) {
    return static_cast<uint32_t>(stochastic_integer(clamped(y, largest), random)) & 0xff;
  }
  DLT_HD static float scaled(uint32_t code, float scale) { return value(code) * scale; }
  DLT_HD static float value(uint32_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
};

}  // namespace dltrain::math
