#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

namespace dltrain::bindings {

// Each function adds one part to the Python module.
void bind_groups(py::module_& module);
void bind_optimizers(py::module_& module);
void bind_states(py::module_& module);
void bind_codecs(py::module_& module);
void bind_plans(py::module_& module);
void bind_simulate(py::module_& module);
void bind_buckets(py::module_& module);
void bind_levels(py::module_& module);
void bind_communicator(py::module_& module);
void bind_outer_step(py::module_& module);
void bind_mailbox(py::module_& module);
void bind_store(py::module_& module);
void bind_build(py::module_& module);

// The names of the ops of the optimizers.
std::vector<std::string> optimizer_ops();

}  // namespace dltrain::bindings
