#pragma once

#include <ATen/record_function.h>

#include <optional>

namespace dltrain::bindings {

// Hides messages from profilers: a message may be posted long before it arrives, and would outlive the profiler's session. The guard takes
// microseconds, so it is only used if there are callbacks.
class Unobserved {
 public:
  Unobserved() {
    if (at::hasCallbacks()) guard_.emplace();
  }

 private:
  std::optional<at::DisableRecordFunctionGuard> guard_;
};

}  // namespace dltrain::bindings
