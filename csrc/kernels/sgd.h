#pragma once

#include "core/host_device.h"
#include "kernels/scalars.h"
#include "math/sgd.h"

namespace dltrain {

// An operation of for_each. Streams: parameter, gradient and, with momentum, momentum_buffer.
template <int K>
struct SGD {
  static constexpr int streams = K;
  static constexpr bool written[] = {true, false, true};
  using Element = math::SGDElement;

  math::SGD hyper;
  Step step;
  bool first;  // the buffers hold nothing yet

  DLT_HD bool skip() const { return step.scalars.skip(); }
  DLT_HD Element at(const void*) const { return hyper.at(first, step.scalars.lr_or(step.lr), step.scalars.grad_factor(step.maximize)); }
  static bool same(const void*, const void*) { return true; }
};

}  // namespace dltrain
