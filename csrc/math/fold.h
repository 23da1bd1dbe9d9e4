#pragma once

// The fp32 sum at a hop of an all-reduce: y = s_0 x_0 + s_1 x_1 + ..., added in the order given. A rank scales its own contribution (1/p
// for an average) before it is added or sent, so that a sum of p of them does not overflow where its average would not.

#include "core/host_device.h"

namespace dltrain::math {

struct Fold {
  DLT_HD static float contribution(float x, float scale) { return x * scale; }
  DLT_HD static float add(float sum, float x) { return sum + x; }
};

}  // namespace dltrain::math
