#include "kernels/sgd.h"

#include <torch/library.h>

#include <unordered_set>

#include "bindings/group.h"
#include "bindings/module.h"
#include "bindings/updates.h"
#include "kernels/for_each.h"

namespace dltrain::bindings {

namespace {

// The updates of one SGD step: without momentum, at a parameter's first step with it, and later.
class SGDUpdates {
 public:
  void clear() {
    plain_.clear();
    first_.clear();
    later_.clear();
  }

  // momentum_buffer is null without momentum, master where there is none.
  void add(int64_t index, const at::Tensor& param, const at::Tensor& grad, const at::Tensor* momentum_buffer, const at::Tensor* master,
           bool first) {
    if (momentum_buffer) {
      (first ? first_ : later_).add({&param, &grad, momentum_buffer}, master, nullptr, index);
    } else {
      plain_.add({&param, &grad}, master, nullptr, index);
    }
  }

  void collect(Gradients& into) const {
    plain_.collect(into);
    first_.collect(into);
    later_.collect(into);
  }

  void run(const math::SGD& hyper, StepArguments& arguments) {
    run(plain_, hyper, arguments, false);
    run(first_, hyper, arguments, true);
    run(later_, hyper, arguments, false);
  }

 private:
  template <int K>
  static void run(Updates<K>& updates, const math::SGD& hyper, StepArguments& arguments, bool first) {
    updates.run([&](const Place& place, const at::Device& device, const TensorList<K>& list, const TensorList<1>&) {
      for_each(place, list, SGD<K>{hyper, arguments.on(device), first});
    });
  }

  Updates<2> plain_{{"params", "grads"}};
  Updates<3> first_{{"params", "grads", "momentum_buffers"}}, later_{{"params", "grads", "momentum_buffers"}};
};

class SGDGroup : public GroupOf<SGDUpdates> {
 public:
  SGDGroup() : GroupOf({"momentum_buffer"}) {}

  // first: the parameters whose buffers hold nothing yet.
  py::list gather(const py::dict& state, const py::list& params, bool masters, bool momentum, const py::list& first) {
    std::unordered_set<const c10::TensorImpl*> starting;
    for (const py::handle param : first) starting.insert(THPVariable_Unpack(param.ptr()).unsafeGetTensorImpl());
    updates_.clear();
    const auto take = [&](int64_t index, const auto& param, const auto& grad, const auto& values, const auto* master) {
      updates_.add(index, param, grad, values[0], master, starting.count(param.unsafeGetTensorImpl()) > 0);
    };
    return reader_.gather(state, params, momentum ? 1 : 0, masters, take);
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
                first);
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
