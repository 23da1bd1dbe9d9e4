#include "kernels/lars.h"

#include <torch/library.h>

#include "bindings/module.h"
#include "bindings/optim/group.h"
#include "bindings/optim/updates.h"
#include "core/memory.h"
#include "kernels/for_each.h"
#include "kernels/statistics.h"

namespace dltrain::bindings {

namespace {

// The updates of one LARS step: with a trust ratio or without, each with and without momentum.
class LARSUpdates : public KindsOfUpdates<2, 2, 3, 3> {
 public:
  LARSUpdates()
      : KindsOfUpdates({"params", "grads"}, {"params", "grads"}, {"params", "grads", "momentum_buffers"},
                       {"params", "grads", "momentum_buffers"}) {}

  // momentum_buffer is null without momentum, master where there is none.
  bool add(int64_t index, const at::Tensor& param, const at::Tensor& grad, const at::Tensor* momentum_buffer, const at::Tensor* master,
           bool adapts, Manner manner) {
    if (!momentum_buffer) return (adapts ? of<adapted>() : of<excluded>()).add({&param, &grad}, master, nullptr, index, manner);
    auto& moving = adapts ? of<adapted_moving>() : of<excluded_moving>();
    return moving.add({&param, &grad, momentum_buffer}, master, nullptr, index, manner);
  }

  void run(const math::LARS& hyper, StepArguments& arguments) {
    run(of<adapted>(), hyper, arguments, true);
    run(of<adapted_moving>(), hyper, arguments, true);
    run(of<excluded>(), hyper, arguments, false);
    run(of<excluded_moving>(), hyper, arguments, false);
  }

 private:
  enum Kind { adapted, excluded, adapted_moving, excluded_moving };

  template <int K>
  static void run(Updates<K>& updates, const math::LARS& hyper, StepArguments& arguments, bool adapts) {
    updates.run([&](const Place& place, const at::Device& device, TensorList<K>& list, const TensorList<1>&) {
      const int64_t rows = adapts ? list.size() : 0;
      const Memory memory(place, 2 * rows * static_cast<int64_t>(sizeof(double)));
      auto* const sums = static_cast<double*>(memory.data());
      if (adapts) {
        sum_squares(place, list.stream(0), sums);
        sum_squares(place, list.stream(1), sums + rows);
        for (int64_t row = 0; row < rows; ++row) list.row(row).scalars = sums + row;
      }
      for_each(place, list, LARS<K>{hyper, arguments.on(device), rows});
    });
  }
};

class LARSGroup : public GroupOf<LARSUpdates> {
 public:
  LARSGroup() : GroupOf({"momentum_buffer"}) {}

  // Parameters of at least so many dimensions have a trust ratio.
  py::list gather(const py::dict& state, const py::list& params, bool masters, bool momentum, int64_t adapt_from) {
    const auto take = [&](auto& updates, int64_t index, const Reading& reading, Manner manner) {
      const bool adapts = reading.param->dim() >= adapt_from;
      return updates.add(index, *reading.param, *reading.grad, reading.values[0], reading.master, adapts, manner);
    };
    return GroupOf::gather(state, params, momentum ? 1 : 0, masters, take);
  }
};

void lars_op(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers, at::TensorList masters, double lr,
             double momentum, double weight_decay, double trust_coefficient, double eps, bool nesterov, bool lr_inside, bool clip,
             bool decays_excluded, bool decays_at_zero_norm, bool adapt, bool maximize, const std::optional<at::Tensor>& tensor_lr,
             const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
  check_lengths(params, {{"grads", grads}});
  if (momentum != 0.0) check_lengths(params, {{"momentum_buffers", momentum_buffers}});
  if (!masters.empty()) check_lengths(params, {{"masters", masters}});
  LARSUpdates updates;
  for (size_t i = 0; i < params.size(); ++i) {
    updates.add(static_cast<int64_t>(i), params[i], grads[i], momentum != 0.0 ? &momentum_buffers[i] : nullptr, at_or_null(masters, i),
                adapt, Manner::any);
  }
  StepArguments arguments(lr, maximize, tensor_lr, grad_scale, found_inf);
  updates.run({momentum, weight_decay, trust_coefficient, eps, nesterov, lr_inside, clip, decays_excluded, decays_at_zero_norm}, arguments);
}

TORCH_LIBRARY_FRAGMENT(dltrain_ext, library) {
  library.def(
      "lars_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, *, float lr, float momentum=0.0, "
      "float weight_decay=0.0, float trust_coefficient=0.001, float eps=0.0, bool nesterov=False, bool lr_inside=True, bool clip=False, "
      "bool decays_excluded=True, bool decays_at_zero_norm=True, bool adapt=True, bool maximize=False, Tensor? tensor_lr=None, Tensor? "
      "grad_scale=None, Tensor? found_inf=None) -> ()");
}

TORCH_LIBRARY_IMPL(dltrain_ext, CPU, library) { library.impl("lars_", lars_op); }
TORCH_LIBRARY_IMPL(dltrain_ext, CUDA, library) {
  if constexpr (built_with_cuda) library.impl("lars_", lars_op);
}

}  // namespace

void bind_lars(py::module_& module) {
  py::class_<LARSGroup, FusedGroup>(module, "LARSGroup")
      .def(py::init<>())
      .def("gather", &LARSGroup::gather, py::arg("state"), py::arg("params"), py::arg("masters"), py::arg("momentum"),
           py::arg("adapt_from"))
      .def("release", &LARSGroup::release)
      .def(
          "step",
          [](LARSGroup& self, const StepArguments& arguments, double momentum, double weight_decay, double trust_coefficient, double eps,
             bool nesterov, bool lr_inside, bool clip, bool decays_excluded, bool decays_at_zero_norm) {
            self.step(
                math::LARS{momentum, weight_decay, trust_coefficient, eps, nesterov, lr_inside, clip, decays_excluded, decays_at_zero_norm},
                arguments);
          },
          py::arg("arguments"), py::kw_only(), py::arg("momentum"), py::arg("weight_decay"), py::arg("trust_coefficient"), py::arg("eps"),
          py::arg("nesterov"), py::arg("lr_inside"), py::arg("clip"), py::arg("decays_excluded"), py::arg("decays_at_zero_norm"));
}

}  // namespace dltrain::bindings
