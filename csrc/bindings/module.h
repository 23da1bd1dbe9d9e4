#pragma once

#include <torch/csrc/utils/pybind.h>

namespace dltrain::bindings {

// Each file of this room adds its part of the module.
void bind_groups(py::module_& module);
void bind_adamw(py::module_& module);
void bind_lars(py::module_& module);
void bind_sgd(py::module_& module);
void bind_codecs(py::module_& module);
void bind_plans(py::module_& module);
void bind_simulate(py::module_& module);
void bind_buckets(py::module_& module);
void bind_levels(py::module_& module);
void bind_communicator(py::module_& module);
void bind_build(py::module_& module);

}  // namespace dltrain::bindings
