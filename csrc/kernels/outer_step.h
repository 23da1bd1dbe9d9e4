#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/coding.h"
#include "kernels/message.h"
#include "kernels/tile.h"
#include "math/outer_step.h"

namespace dltrain {

// The tensors of an outer step. `message` is the mean of the sites' differences, of `numel` elements.
struct OuterUpdate {
  int64_t numel = 0;
  const uint8_t* message = nullptr;
  float* backup = nullptr;    // what all sites had after the last outer step
  float* momentum = nullptr;  // null if there is none
  TypedPointer parameter;     // this site's
  TypedPointer copy;          // of the parameter, in a half type; may be null
  int* nonfinite = nullptr;   // becomes 1 if an element of the mean is not finite
  math::OuterStep rule;
};

// An operation of map_blocks: decodes the mean, and writes momentum, backup, parameter and copy.
template <class C>
struct OuterStep : OuterUpdate {
  static constexpr int elements = MessageLayout<C>::tile;
  static constexpr bool in_lists = true;

  DLT_HD void operator()(Tile auto& tile) const {
    const math::OuterStep by = rule;
    decode<C>(tile, message, numel, [](float, float x) DLT_HD_LAMBDA { return x; });
    if (tile.largest_magnitude() >= 0x7f800000) tile.raise(nonfinite);
    if (momentum) {
      tile.update(momentum, momentum, [=](float d, float, float m) DLT_HD_LAMBDA { return by.momentum_after(m, d); });
      tile.load(momentum, [=](float d, float m) DLT_HD_LAMBDA { return by.step(m, d); });
      tile.load(backup, [](float step, float b) DLT_HD_LAMBDA { return b - step; });
    } else {
      tile.load(backup, [=](float d, float b) DLT_HD_LAMBDA { return b - by.step(d, d); });
    }
    tile.store(backup, [](float b, float) DLT_HD_LAMBDA { return b; });
    if (by.mix != 0.0f) {
      with_type(parameter,
                [&](auto* from) DLT_HD_LAMBDA { tile.load(from, [=](float b, float p) DLT_HD_LAMBDA { return by.mixed(p, b); }); });
    }
    write(tile, parameter);
    if (copy.data) write(tile, copy);
  }

 private:
  static DLT_HD void write(const Tile auto& tile, const TypedPointer& to) {
    with_type(to, [&](auto* out) DLT_HD_LAMBDA { tile.store(out, [](float p, float) DLT_HD_LAMBDA { return p; }); });
  }
};

}  // namespace dltrain
