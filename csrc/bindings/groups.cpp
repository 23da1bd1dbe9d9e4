#include <ATen/ops/empty.h>

#include "bindings/group.h"
#include "bindings/module.h"
#include "bindings/updates.h"
#include "kernels/statistics.h"

namespace dltrain::bindings {

namespace {

// For each device the sum of squares of all gradients that the groups have read there, a float64 number.
std::vector<at::Tensor> sum_squares_of(const std::vector<const FusedGroup*>& groups) {
  Gradients gradients;
  for (const FusedGroup* group : groups) group->collect(gradients);
  std::vector<at::Tensor> sums;
  py::gil_scoped_release no_gil;
  for (const auto& [device, lists] : gradients) {
    const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::make_optional(device));
    const at::Tensor& sum = sums.emplace_back(at::empty({}, at::TensorOptions(device).dtype(at::kDouble)));
    sum_squares(caller_place(device), lists, {sum.mutable_data_ptr<double>(), nullptr});
  }
  return sums;
}

}  // namespace

void bind_groups(py::module_& module) {
  py::class_<FusedGroup>(module, "FusedGroup");
  py::class_<StepArguments>(module, "StepArguments")
      .def(py::init<double, bool, std::optional<at::Tensor>, std::optional<at::Tensor>, std::optional<at::Tensor>>(), py::kw_only(),
           py::arg("lr"), py::arg("maximize"), py::arg("tensor_lr"), py::arg("grad_scale"), py::arg("found_inf"));
  module.def("sum_squares_of", sum_squares_of, py::arg("groups"));
}

}  // namespace dltrain::bindings
