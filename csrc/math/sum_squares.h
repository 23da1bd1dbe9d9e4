#pragma once

// The sum of squares of fp32 numbers, in double. No square of an fp32 number overflows or becomes zero there, so the sum is finite exactly
// if all numbers are.

#include "core/host_device.h"

namespace dltrain::math {

struct SumSquares {
  DLT_HD static double none() { return 0.0; }
  DLT_HD static double add(double sum, float x) { return sum + static_cast<double>(x) * static_cast<double>(x); }
  DLT_HD static double merge(double a, double b) { return a + b; }
  DLT_HD static bool all_finite(double sum) { return sum - sum == 0.0; }
};

}  // namespace dltrain::math
