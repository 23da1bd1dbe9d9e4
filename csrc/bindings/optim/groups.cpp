#include "bindings/module.h"
#include "bindings/optim/group.h"
#include "bindings/optim/step.h"

namespace dltrain::bindings {

namespace {

// For each device, the sum of squares of all gradients on it that the groups have read, as a float64 number.
std::vector<at::Tensor> sum_squares_of(const std::vector<const FusedGroup*>& groups) {
  Gradients gradients;
  for (const FusedGroup* group : groups) group->collect(gradients);
  std::vector<at::Tensor> sums;
  py::gil_scoped_release no_gil;
  for (const auto& [device, lists] : gradients) sums.push_back(sum_squares_on(device, lists));
  return sums;
}

}  // namespace

void bind_groups(py::module_& module) {
  py::class_<StepArguments>(module, "StepArguments")
      .def(py::init<double, bool, std::optional<at::Tensor>, std::optional<at::Tensor>, std::optional<at::Tensor>, int64_t,
                    std::optional<at::Tensor>>(),
           py::kw_only(), py::arg("lr"), py::arg("maximize"), py::arg("tensor_lr"), py::arg("grad_scale"), py::arg("found_inf"),
           py::arg("seed"), py::arg("rounding_step"));
  py::class_<FusedGroup>(module, "FusedGroup")
      .def("gather", &FusedGroup::gather, py::arg("state"), py::arg("params"), py::kw_only(), py::arg("masters"), py::arg("optional"),
           py::arg("flagged"), py::arg("flagged_from"), py::arg("runs"), py::arg("numbers"))
      .def("take_norms", &FusedGroup::take_norms, py::arg("arguments"), py::arg("hyper"), py::arg("sums"))
      .def("release", &FusedGroup::release)
      .def("step", &FusedGroup::step, py::arg("arguments"), py::arg("hyper"));
  module.def("sum_squares_of", sum_squares_of, py::arg("groups"));
}

}  // namespace dltrain::bindings
