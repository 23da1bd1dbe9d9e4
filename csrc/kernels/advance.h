#pragma once

#include "core/host_device.h"
#include "kernels/scalars.h"

namespace dltrain {

// An operation of for_each: counts a step. Streams: the counters.
struct Advance {
  static constexpr int streams = 1;
  static constexpr bool written[] = {true};
  struct Element {
    DLT_HD void operator()(float& count) const { count += 1.0f; }
  };

  Scalars scalars;

  DLT_HD bool skip() const { return scalars.skip(); }
  DLT_HD Element at(const void*) const { return {}; }
  static bool same(const void*, const void*) { return true; }
};

}  // namespace dltrain
