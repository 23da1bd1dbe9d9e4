#pragma once

#include "core/host_device.h"
#include "kernels/scalars.h"
#include "math/adamw.h"

namespace dltrain {

// An operation of for_each. Streams: parameter, gradient, exp_avg, exp_avg_sq and, for AMSGrad, max_exp_avg_sq. A row's scalar is its step
// count, already advanced.
template <int K>
struct AdamW {
  static constexpr int streams = K;
  static constexpr bool written[] = {true, false, true, true, true};
  using Element = math::AdamWElement;

  math::AdamW hyper;
  Step step;

  DLT_HD bool skip() const { return step.scalars.skip(); }
  DLT_HD Element at(const void* count) const {
    return hyper.at(*static_cast<const float*>(count), step.scalars.lr_or(step.lr), step.scalars.grad_factor(step.maximize));
  }
  static bool same(const void* count, const void* other) { return *static_cast<const float*>(count) == *static_cast<const float*>(other); }
};

}  // namespace dltrain
