#pragma once

#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

#include "core/place.h"

namespace dltrain::bindings {

// Each file of this room adds its part of the module.
void bind_adamw(py::module_& module);
void bind_plans(py::module_& module);
void bind_communicator(py::module_& module);

// The calling thread, with torch's threads beside it.
inline Place caller_place() {
  return {[](int64_t n, int64_t grain, const Range& body) { at::parallel_for(0, n, grain, body); }};
}

}  // namespace dltrain::bindings
