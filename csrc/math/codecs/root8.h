#pragma once

// For states of optimizers that are never negative. 128 elements share an fp32 scale, their maximum. The code is the integer next to
// 255 sqrt(x / maximum), and at least 1 unless x is 0: a second moment that became 0 would leave only eps below the first moment, whose
// steps would then be thousands of times too large.

#include <cmath>

#include "math/block.h"

namespace dltrain::math {

struct Root8 {
  static constexpr int block = 128;
  static constexpr Statistic statistic = Statistic::absmax;
  static constexpr float largest = 1.0f;
  using Word = uint8_t;
  static constexpr int bits = 8;

  DLT_HD static uint32_t nearest(float y) {
    const float root = 255.0f * sqrtf(y), least = y > 0.0f ? 1.0f : 0.0f;
    return nearest_integer(root > least ? root : least) & 0xff;
  }
  DLT_HD static float scaled(uint32_t code, float scale) {
    const float root = static_cast<float>(static_cast<int32_t>(code)) * step;
    return root * root * scale;
  }

 private:
  static constexpr float step = 1.0f / 255.0f;
  static_assert(255.0f * step == 1.0f);  // decoding and encoding again gives the same code and scale
};

}  // namespace dltrain::math
