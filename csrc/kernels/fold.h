#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "math/fold.h"

namespace dltrain {

// An operation of map_blocks: own <- the sum, in order, of received[0..own_place), own * scale, received[own_place..count).
struct Fold {
  static constexpr int64_t elements = 2048;  // of a block: its sum stays in the first-level cache however many operands there are
  using Arithmetic = math::Fold;

  float* own;
  const float* const* received;
  int count;
  int own_place;
  float scale;

  struct Operand {
    const float* data;
    float scale;
    DLT_HD float operator[](int64_t i) const { return Arithmetic::contribution(data[i], scale); }
  };

  DLT_HD int operands() const { return count + 1; }
  DLT_HD Operand operand(int k) const { return k == own_place ? Operand{own, scale} : Operand{received[k < own_place ? k : k - 1], 1.0f}; }
  DLT_HD void emit(int64_t i, float sum) const { own[i] = sum; }
};

}  // namespace dltrain
