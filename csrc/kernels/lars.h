#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "kernels/scalars.h"
#include "math/lars.h"

namespace dltrain {

// An operation of for_each. Streams: those of SGD. A row's scalars, where it has a trust ratio, are the sum of squares of its parameter
// and, `apart` further on, that of its gradient.
template <int K>
struct LARS {
  static constexpr int streams = K;
  static constexpr bool written[] = {true, false, true};
  using Element = math::SGDElement;

  math::LARS hyper;
  Step step;
  int64_t apart;

  DLT_HD bool skip() const { return step.scalars.skip(); }
  DLT_HD Element at(const void* scalars) const {
    const double lr = step.scalars.lr_or(step.lr), grad_factor = step.scalars.grad_factor(step.maximize);
    if (!scalars) return hyper.excluded(lr, grad_factor);
    const auto* const sums = static_cast<const double*>(scalars);
    return hyper.adapted(sums[0], sums[apart], lr, grad_factor);
  }
  static bool same(const void* sums, const void* others) { return sums == others; }
};

}  // namespace dltrain
