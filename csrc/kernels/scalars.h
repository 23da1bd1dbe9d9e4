#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace dltrain {

// Numbers of a step in memory of its tensors' device, so that the host does not wait for them. Each may be null.
struct Scalars {
  const float* lr = nullptr;           // replaces the lr of the Step
  const double* grad_scale = nullptr;  // gradients are divided by it
  const float* found_inf = nullptr;    // if not zero, the step changes nothing
  const int64_t* steps = nullptr;      // how many were taken before, for random numbers

  DLT_HD bool skip() const { return found_inf && *found_inf != 0.0f; }
  DLT_HD double lr_or(double given) const { return lr ? static_cast<double>(*lr) : given; }
  DLT_HD double scale() const { return grad_scale ? *grad_scale : 1.0; }
  DLT_HD double grad_factor(bool maximize) const { return (maximize ? -1.0 : 1.0) / scale(); }
};

// The arguments that the steps of all optimizers have.
struct Step {
  double lr;
  bool maximize = false;
  Scalars scalars;
  uint64_t seed = 0;  // of the random numbers
};

}  // namespace dltrain
