#include <ATen/ops/empty.h>

#include "bindings/module.h"
#include "bindings/optim/group.h"
#include "bindings/optim/updates.h"
#include "kernels/judge.h"
#include "kernels/map_blocks.h"
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

struct Judgement {
  at::Tensor divisor, norm, found_inf;
};

Judgement judge(const at::Tensor& sum_squares, const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf,
                double max_norm) {
  const at::Device device = sum_squares.device();
  TORCH_CHECK_VALUE(is_supported(device) && sum_squares.numel() == 1 && sum_squares.scalar_type() == at::kDouble,
                    "sum_squares: expected one float64 number on ", supported_devices(), ", got ", sum_squares.toString(), " of shape ",
                    sum_squares.sizes());
  check_dense({sum_squares, "sum_squares"}, device);
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::make_optional(device));
  StepArguments arguments(/*lr=*/0.0, /*maximize=*/false, /*tensor_lr=*/std::nullopt, grad_scale, found_inf);
  const auto fresh = [&](at::ScalarType type) { return at::empty({}, at::TensorOptions(device).dtype(type)); };
  Judgement made{fresh(at::kDouble), fresh(at::kFloat), fresh(at::kFloat)};
  map_blocks(caller_place(device), Judge::elements,
             Judge{sum_squares.const_data_ptr<double>(), arguments.on(device).scalars, max_norm, made.divisor.mutable_data_ptr<double>(),
                   made.norm.mutable_data_ptr<float>(), made.found_inf.mutable_data_ptr<float>()});
  return made;
}

}  // namespace

void bind_groups(py::module_& module) {
  py::class_<StepArguments>(module, "StepArguments")
      .def(py::init<double, bool, std::optional<at::Tensor>, std::optional<at::Tensor>, std::optional<at::Tensor>>(), py::kw_only(),
           py::arg("lr"), py::arg("maximize"), py::arg("tensor_lr"), py::arg("grad_scale"), py::arg("found_inf"));
  py::class_<FusedGroup>(module, "FusedGroup")
      .def("gather", &FusedGroup::gather, py::arg("state"), py::arg("params"), py::kw_only(), py::arg("masters"), py::arg("optional"),
           py::arg("flagged"), py::arg("flagged_from"))
      .def("release", &FusedGroup::release)
      .def("step", &FusedGroup::step, py::arg("arguments"), py::arg("hyper"));
  py::class_<Judgement>(module, "Judgement")
      .def_readonly("divisor", &Judgement::divisor)
      .def_readonly("norm", &Judgement::norm)
      .def_readonly("found_inf", &Judgement::found_inf);
  module.def("judge", judge, py::arg("sum_squares"), py::kw_only(), py::arg("grad_scale"), py::arg("found_inf"), py::arg("max_norm"),
             py::call_guard<py::gil_scoped_release>());
  module.def("sum_squares_of", sum_squares_of, py::arg("groups"));
}

}  // namespace dltrain::bindings
