#pragma once

// The sum of squares of fp32 numbers, in double: no square of one overflows or becomes zero there, so the sum is finite exactly if all of
// them are.

#include "core/host_device.h"

namespace dltrain::math {

struct SumSquares {
  using Value = double;

  DLT_HD static Value none() { return 0.0; }
  DLT_HD static Value add(Value sum, float x) { return sum + static_cast<double>(x) * static_cast<double>(x); }
  DLT_HD static Value merge(Value a, Value b) { return a + b; }
  DLT_HD static bool all_finite(Value sum) { return sum - sum == 0.0; }
};

}  // namespace dltrain::math
