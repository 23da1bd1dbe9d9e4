#include "kernels/sgd.h"

#include <torch/library.h>

#include <unordered_set>

#include "bindings/module.h"
#include "bindings/optim/group.h"
#include "bindings/optim/updates.h"
#include "kernels/for_each.h"

namespace dltrain::bindings {

namespace {

// The updates of one SGD step: without momentum, at a parameter's first step with it, and later.
class SGDUpdates : public KindsOfUpdates<2, 3, 3> {
 public:
  SGDUpdates() : KindsOfUpdates({"params", "grads"}, {"params", "grads", "momentum_buffers"}, {"params", "grads", "momentum_buffers"}) {}

  // momentum_buffer is null without momentum, master where there is none.
  bool add(int64_t index, const at::Tensor& param, const at::Tensor& grad, const at::Tensor* momentum_buffer, const at::Tensor* master,
           bool is_first, Manner manner) {
    if (!momentum_buffer) return of<plain>().add({&param, &grad}, master, nullptr, index, manner);
    return (is_first ? of<first>() : of<later>()).add({&param, &grad, momentum_buffer}, master, nullptr, index, manner);
  }

  void run(const math::SGD& hyper, StepArguments& arguments) {
    run(of<plain>(), hyper, arguments, false);
    run(of<first>(), hyper, arguments, true);
    run(of<later>(), hyper, arguments, false);
  }

 private:
  enum Kind { plain, first, later };

  template <int K>
  static void run(Updates<K>& updates, const math::SGD& hyper, StepArguments& arguments, bool is_first) {
    updates.run([&](const Place& place, const at::Device& device, const TensorList<K>& list, const TensorList<1>&) {
      for_each(place, list, SGD<K>{hyper, arguments.on(device), is_first});
    });
  }
};

class SGDGroup : public GroupOf<SGDUpdates> {
 public:
  SGDGroup() : GroupOf({"momentum_buffer"}) {}

  // first: the parameters whose buffers hold nothing yet.
  py::list gather(const py::dict& state, const py::list& params, bool masters, bool momentum, const py::list& first) {
    std::unordered_set<const c10::TensorImpl*> starting;
    for (const py::handle param : first) starting.insert(THPVariable_Unpack(param.ptr()).unsafeGetTensorImpl());
    const auto take = [&](auto& updates, int64_t index, const Reading& reading, Manner manner) {
      const bool is_first = starting.count(reading.param->unsafeGetTensorImpl()) > 0;
      return updates.add(index, *reading.param, *reading.grad, reading.values[0], reading.master, is_first, manner);
    };
    return GroupOf::gather(state, params, momentum ? 1 : 0, masters, take);
  }
};

void sgd_op(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers, at::TensorList masters, double lr,
            double momentum, double dampening, double weight_decay, bool nesterov, bool maximize, bool first,
            const std::optional<at::Tensor>& tensor_lr, const std::optional<at::Tensor>& grad_scale,
            const std::optional<at::Tensor>& found_inf) {
  check_lengths(params, {{"grads", grads}});
  if (momentum != 0.0) check_lengths(params, {{"momentum_buffers", momentum_buffers}});
  if (!masters.empty()) check_lengths(params, {{"masters", masters}});
  SGDUpdates updates;
  for (size_t i = 0; i < params.size(); ++i) {
    updates.add(static_cast<int64_t>(i), params[i], grads[i], momentum != 0.0 ? &momentum_buffers[i] : nullptr, at_or_null(masters, i),
                first, Manner::any);
  }
  StepArguments arguments(lr, maximize, tensor_lr, grad_scale, found_inf);
  updates.run({momentum, dampening, weight_decay, nesterov}, arguments);
}

TORCH_LIBRARY_FRAGMENT(dltrain_ext, library) {
  library.def(
      "sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, *, float lr, float momentum=0.0, "
      "float dampening=0.0, "
      "float weight_decay=0.0, bool nesterov=False, bool maximize=False, bool first=False, Tensor? tensor_lr=None, Tensor? "
      "grad_scale=None, Tensor? found_inf=None) -> ()");
}

TORCH_LIBRARY_IMPL(dltrain_ext, CPU, library) { library.impl("sgd_", sgd_op); }
TORCH_LIBRARY_IMPL(dltrain_ext, CUDA, library) {
  if constexpr (built_with_cuda) library.impl("sgd_", sgd_op);
}

}  // namespace

void bind_sgd(py::module_& module) {
  py::class_<SGDGroup, FusedGroup>(module, "SGDGroup")
      .def(py::init<>())
      .def("gather", &SGDGroup::gather, py::arg("state"), py::arg("params"), py::arg("masters"), py::arg("momentum"), py::arg("first"))
      .def("release", &SGDGroup::release)
      .def(
          "step",
          [](SGDGroup& self, const StepArguments& arguments, double momentum, double dampening, double weight_decay, bool nesterov) {
            self.step(math::SGD{momentum, dampening, weight_decay, nesterov}, arguments);
          },
          py::arg("arguments"), py::kw_only(), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"), py::arg("nesterov"));
}

}  // namespace dltrain::bindings
