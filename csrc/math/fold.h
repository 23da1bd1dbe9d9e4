#pragma once

// The fp32 sum at a hop of an all-reduce: y = x_0 + x_1 + ..., added in the order given. A rank scales its own contribution (1/p for an
// average) before it is added or sent, so that a sum of p of them does not overflow where its average would not.

#include "core/host_device.h"

namespace dltrain::math {

struct Fold {
  float scale = 1.0f;

  DLT_HD float own(float x) const { return x * scale; }
  DLT_HD float add(float sum, float x) const { return sum + x; }
};

}  // namespace dltrain::math
