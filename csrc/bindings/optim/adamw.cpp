#include "kernels/adamw.h"

#include <torch/library.h>

#include "bindings/module.h"
#include "bindings/optim/group.h"
#include "bindings/optim/updates.h"
#include "kernels/for_each.h"

namespace dltrain::bindings {

namespace {

// The updates of one AdamW step, with and without AMSGrad.
class AdamWUpdates : public KindsOfUpdates<4, 5> {
 public:
  AdamWUpdates()
      : KindsOfUpdates({"params", "grads", "exp_avgs", "exp_avg_sqs"}, {"params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"}) {}

  // max_exp_avg_sq is null without AMSGrad, master where there is none.
  bool add(int64_t index, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
           const at::Tensor* max_exp_avg_sq, const at::Tensor* master, const at::Tensor& step, Manner manner) {
    return max_exp_avg_sq ? of<amsgrad>().add({&param, &grad, &exp_avg, &exp_avg_sq, max_exp_avg_sq}, master, &step, index, manner)
                          : of<plain>().add({&param, &grad, &exp_avg, &exp_avg_sq}, master, &step, index, manner);
  }

  void run(const math::AdamW& hyper, StepArguments& arguments) {
    run(of<plain>(), hyper, arguments);
    run(of<amsgrad>(), hyper, arguments);
  }

 private:
  enum Kind { plain, amsgrad };

  template <int K>
  static void run(Updates<K>& updates, const math::AdamW& hyper, StepArguments& arguments) {
    updates.run([&](const Place& place, const at::Device& device, const TensorList<K>& list, const TensorList<1>& steps) {
      const Step step = arguments.on(device);
      for_each(place, steps, Advance{step.scalars});
      for_each(place, list, AdamW<K>{hyper, step});
    });
  }
};

class AdamWGroup : public GroupOf<AdamWUpdates> {
 public:
  AdamWGroup() : GroupOf({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}) {}

  py::list gather(const py::dict& state, const py::list& params, bool masters, bool amsgrad) {
    return GroupOf::gather(
        state, params, amsgrad ? 4 : 3, masters, [](auto& updates, int64_t index, const Reading& reading, Manner manner) {
          const auto& [step, exp_avg, exp_avg_sq, max_exp_avg_sq] = reading.values;
          return updates.add(index, *reading.param, *reading.grad, *exp_avg, *exp_avg_sq, max_exp_avg_sq, reading.master, *step, manner);
        });
  }
};

void adamw_op(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
              at::TensorList max_exp_avg_sqs, at::TensorList steps, at::TensorList masters, double lr, double beta1, double beta2,
              double eps, double weight_decay, bool maximize, const std::optional<at::Tensor>& tensor_lr,
              const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
  check_lengths(params, {{"grads", grads}, {"exp_avgs", exp_avgs}, {"exp_avg_sqs", exp_avg_sqs}, {"steps", steps}});
  if (!max_exp_avg_sqs.empty()) check_lengths(params, {{"max_exp_avg_sqs", max_exp_avg_sqs}});
  if (!masters.empty()) check_lengths(params, {{"masters", masters}});
  AdamWUpdates updates;
  for (size_t i = 0; i < params.size(); ++i) {
    updates.add(static_cast<int64_t>(i), params[i], grads[i], exp_avgs[i], exp_avg_sqs[i], at_or_null(max_exp_avg_sqs, i),
                at_or_null(masters, i), steps[i], Manner::any);
  }
  StepArguments arguments(lr, maximize, tensor_lr, grad_scale, found_inf);
  updates.run({beta1, beta2, eps, weight_decay}, arguments);
}

TORCH_LIBRARY_FRAGMENT(dltrain_ext, library) {
  library.def(
      "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, "
      "Tensor(e!)[] steps, Tensor(f!)[] masters, *, float lr, float beta1, float beta2, float eps, float weight_decay, bool "
      "maximize=False, Tensor? "
      "tensor_lr=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");
}

TORCH_LIBRARY_IMPL(dltrain_ext, CPU, library) { library.impl("adamw_", adamw_op); }
TORCH_LIBRARY_IMPL(dltrain_ext, CUDA, library) {
  if constexpr (built_with_cuda) library.impl("adamw_", adamw_op);
}

}  // namespace

void bind_adamw(py::module_& module) {
  py::class_<AdamWGroup, FusedGroup>(module, "AdamWGroup")
      .def(py::init<>())
      .def("gather", &AdamWGroup::gather, py::arg("state"), py::arg("params"), py::arg("masters"), py::arg("amsgrad"))
      .def("release", &AdamWGroup::release)
      .def(
          "step",
          [](AdamWGroup& self, const StepArguments& arguments, double beta1, double beta2, double eps, double weight_decay) {
            self.step(math::AdamW{beta1, beta2, eps, weight_decay}, arguments);
          },
          py::arg("arguments"), py::kw_only(), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"));
}

}  // namespace dltrain::bindings
