#include "kernels/adamw.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <deque>

#include "bindings/module.h"
#include "bindings/trail.h"

namespace dltrain::bindings {

namespace {

// The tensors of one parameter's update. max_exp_avg_sq is undefined without AMSGrad.
struct Update {
  const at::Tensor &param, &grad, &exp_avg, &exp_avg_sq, &max_exp_avg_sq, &step;
};

bool same_shape(const at::Tensor& a, const at::Tensor& b) {
  // Small tensors by the thousand: calling memcmp for a dimension or two is what it would cost.
  const auto x = a.sizes(), y = b.sizes();
  if (x.size() != y.size()) return false;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] != y[i]) return false;
  }
  return true;
}

// Some tensors stand for other values than their memory holds.
inline bool is_lazy(const at::Tensor& tensor) { return tensor.is_neg() || tensor._is_zerotensor(); }

inline bool fits(const at::Tensor& tensor, const at::Tensor& param) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.is_cpu() && impl.layout() == at::kStrided && !impl.is_python_dispatch() && !is_lazy(tensor) &&
         impl.dtype() == caffe2::TypeMeta::Make<float>() && same_shape(tensor, param);
}

[[noreturn]] void refuse(const at::Tensor& tensor, const char* name, int64_t index, const at::Tensor& param) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch() && !is_lazy(tensor), name, "[",
                   index, "]: expected a plain dense tensor, got layout ", tensor.layout(), " (", tensor.toString(), ")");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), name, "[", index, "]: expected a tensor on the CPU, got one on ", tensor.device());
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, name, "[", index, "]: expected dtype float32, got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.sizes() == param.sizes(), name, "[", index, "]: expected shape ", param.sizes(), " of params[", index, "], got ",
                    tensor.sizes());
  TORCH_INTERNAL_ASSERT(false);
}

inline void check_tensor(const at::Tensor& tensor, const char* name, int64_t index, const at::Tensor& param) {
  if (!fits(tensor, param)) refuse(tensor, name, index, param);
}

void check_step(const at::Tensor& step, int64_t index) {
  TORCH_CHECK_TYPE(step.scalar_type() == at::kFloat && step.device().is_cpu() && step.numel() == 1, "steps[", index,
                   "]: expected one float32 number on the CPU, got ", step.toString(), " of shape ", step.sizes());
}

// The rows of one fused step, their vectors reused from step to step. The caller keeps the tensors alive.
class Rows {
 public:
  void clear() {
    plain_.list.clear();
    plain_.steps.clear();
    amsgrad_.list.clear();
    amsgrad_.steps.clear();
    params_.clear();
    dense_grads_.clear();
    copies_.clear();
  }

  void add(const Update& given, int64_t index) {
    const Update update{given.param,          is_lazy(given.grad) ? resolved(given.grad) : given.grad,
                        given.exp_avg,        given.exp_avg_sq,
                        given.max_exp_avg_sq, given.step};
    const bool amsgrad = update.max_exp_avg_sq.defined();
    check_tensor(update.param, "params", index, update.param);
    check_tensor(update.grad, "grads", index, update.param);
    check_tensor(update.exp_avg, "exp_avgs", index, update.param);
    check_tensor(update.exp_avg_sq, "exp_avg_sqs", index, update.param);
    if (amsgrad) check_tensor(update.max_exp_avg_sq, "max_exp_avg_sqs", index, update.param);
    check_step(update.step, index);

    const bool in_place = one_layout(update);
    const auto writable = [&](const at::Tensor& tensor) {
      return static_cast<float*>((in_place ? tensor : copy(tensor)).mutable_data_ptr());
    };
    const at::Tensor& grad = in_place ? update.grad : dense_grads_.emplace_back(update.grad.contiguous());
    // Kernels only read the gradient; the list has one pointer type for all its streams.
    float* const g = static_cast<float*>(const_cast<void*>(grad.const_data_ptr()));
    float *const p = writable(update.param), *const m = writable(update.exp_avg), *const v = writable(update.exp_avg_sq);
    float* const step = static_cast<float*>(update.step.mutable_data_ptr());
    params_.push_back(update.param.unsafeGetTensorImpl());
    if (amsgrad) {
      amsgrad_.list.add({p, g, m, v, writable(update.max_exp_avg_sq)}, update.param.numel());
      amsgrad_.steps.push_back(step);
    } else {
      plain_.list.add({p, g, m, v}, update.param.numel());
      plain_.steps.push_back(step);
    }
  }

  void run(const math::AdamW& hyper) {
    adamw(caller_place(), plain_, hyper);
    adamw(caller_place(), amsgrad_, hyper);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& [original, copy] : copies_) original.copy_(copy);
    // So that autograd notices where a graph still needs the old values.
    for (c10::TensorImpl* param : params_) {
      if (!param->is_inference()) param->bump_version();
    }
  }

 private:
  // The same element at the same offset in all tensors, with nothing in between: then the update may walk through memory.
  static bool one_layout(const Update& update) {
    const at::Tensor* tensors[] = {&update.param, &update.grad, &update.exp_avg, &update.exp_avg_sq, &update.max_exp_avg_sq};
    const auto all = [&](auto&& holds) {
      return std::all_of(std::begin(tensors), std::end(tensors), [&](const at::Tensor* t) { return !t->defined() || holds(*t); });
    };
    return all([](const at::Tensor& t) { return t.is_contiguous(); }) ||
           (update.param.is_non_overlapping_and_dense() && all([&](const at::Tensor& t) { return t.strides() == update.param.strides(); }));
  }

  const at::Tensor& resolved(const at::Tensor& grad) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return dense_grads_.emplace_back(at::empty(grad.sizes(), grad.options()).copy_(grad));
  }

  const at::Tensor& copy(const at::Tensor& tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return copies_.emplace_back(tensor, tensor.clone(at::MemoryFormat::Contiguous)).second;
  }

  AdamWTensors<4> plain_;
  AdamWTensors<5> amsgrad_;
  std::vector<c10::TensorImpl*> params_;
  std::deque<at::Tensor> dense_grads_;
  std::deque<std::pair<at::Tensor, at::Tensor>> copies_;  // written back after the step
};

math::AdamW hyper_parameters(double lr, double beta1, double beta2, double eps, double weight_decay, bool maximize, double grad_scale) {
  return {lr, beta1, beta2, eps, weight_decay, (maximize ? -1.0 : 1.0) / grad_scale};
}

// One parameter group of an optimizer, re-read from Python's objects at every step: parameters may come, go or be replaced, and state may
// be edited by hand.
class AdamWGroup {
 public:
  // Collects the tensors of the next step. Parameters without gradient are passed over; those with a gradient whose state is incomplete are
  // returned: the caller completes it and gathers again.
  py::list gather(const py::dict& state, const py::list& params, bool amsgrad) {
    clear();
    py::list incomplete;
    const Py_ssize_t size = PyList_GET_SIZE(params.ptr());
    trail_.restart(static_cast<size_t>(size));
    for (Py_ssize_t index = 0; index < size; ++index) {
      trail_.next();
      PyObject* object = PyList_GET_ITEM(params.ptr(), index);
      TORCH_CHECK_TYPE(is_tensor(object), "params[", index, "]: expected a tensor, got ", Py_TYPE(object)->tp_name);
      const at::Tensor& param = THPVariable_Unpack(object);
      const at::Tensor& grad = param.grad();
      if (!grad.defined()) continue;
      PyObject* const values = state_of(state.ptr(), object);
      const at::Tensor *step = find(values, step_), *exp_avg = find(values, exp_avg_), *exp_avg_sq = find(values, exp_avg_sq_),
                       *max_exp_avg_sq = amsgrad ? find(values, max_exp_avg_sq_) : &undefined_;
      if (step && exp_avg && exp_avg_sq && max_exp_avg_sq && step->scalar_type() == at::kFloat) {
        rows_.add({param, grad, *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *step}, index);
        trail_.note(object, values);
        trail_.note({&param, &grad, exp_avg, exp_avg_sq, step});
        alive_.push_back(py::reinterpret_borrow<py::object>(object));
        alive_grads_.push_back(grad);
      } else {
        check_tensor(param, "params", index, param);
        if (!is_lazy(grad)) check_tensor(grad, "grads", index, param);
        incomplete.append(py::reinterpret_borrow<py::object>(object));
      }
    }
    return incomplete;
  }

  void step(double lr, double beta1, double beta2, double eps, double weight_decay, bool maximize, double grad_scale) {
    const auto hyper = hyper_parameters(lr, beta1, beta2, eps, weight_decay, maximize, grad_scale);
    {
      py::gil_scoped_release no_gil;
      rows_.run(hyper);
    }
    clear();
  }

 private:
  void clear() {
    rows_.clear();
    alive_.clear();
    alive_grads_.clear();
  }

  // A tensor's hash is its address, but asking for it calls Python code, which is a good part of what a small tensor costs.
  static PyObject* state_of(PyObject* state, PyObject* param) {
    PyObject* values = _PyDict_GetItem_KnownHash(state, param, static_cast<Py_hash_t>(reinterpret_cast<uintptr_t>(param)));
    if (!values) values = PyDict_GetItemWithError(state, param);
    if (!values && PyErr_Occurred()) throw py::error_already_set();
    return values;
  }

  // THPVariable_Check asks a subclass, such as Parameter, in Python's slow way.
  static bool is_tensor(PyObject* object) { return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass)); }

  // A dict finds the very object that is its key without comparing texts.
  static py::object interned(const char* text) { return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text)); }

  const at::Tensor* find(PyObject* values, const py::object& key) {
    PyObject* const value = values && PyDict_Check(values) ? PyDict_GetItemWithError(values, key.ptr()) : nullptr;
    if (!value || !is_tensor(value)) return nullptr;
    alive_.push_back(py::reinterpret_borrow<py::object>(value));
    return &THPVariable_Unpack(value);
  }

  Rows rows_;
  // What the rows point into: another thread may drop it while the kernel runs without the GIL.
  std::vector<py::object> alive_;
  std::vector<at::Tensor> alive_grads_;
  Trail trail_;
  const at::Tensor undefined_;
  const py::object step_ = interned("step"), exp_avg_ = interned("exp_avg"), exp_avg_sq_ = interned("exp_avg_sq"),
                   max_exp_avg_sq_ = interned("max_exp_avg_sq");
};

void adamw_op(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
              at::TensorList max_exp_avg_sqs, at::TensorList steps, double lr, double beta1, double beta2, double eps, double weight_decay,
              bool maximize, double grad_scale) {
  const auto check_length = [&](at::TensorList list, const char* name) {
    TORCH_CHECK_VALUE(list.size() == params.size(), name, ": expected ", params.size(), " tensors, one for each of params, got ",
                      list.size());
  };
  check_length(grads, "grads");
  check_length(exp_avgs, "exp_avgs");
  check_length(exp_avg_sqs, "exp_avg_sqs");
  if (!max_exp_avg_sqs.empty()) check_length(max_exp_avg_sqs, "max_exp_avg_sqs");
  check_length(steps, "steps");

  const at::Tensor undefined;
  Rows rows;
  for (size_t i = 0; i < params.size(); ++i) {
    rows.add({params[i], grads[i], exp_avgs[i], exp_avg_sqs[i], max_exp_avg_sqs.empty() ? undefined : max_exp_avg_sqs[i], steps[i]},
             static_cast<int64_t>(i));
  }
  rows.run(hyper_parameters(lr, beta1, beta2, eps, weight_decay, maximize, grad_scale));
}

TORCH_LIBRARY_FRAGMENT(dltrain_ext, library) {
  library.def(
      "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, "
      "Tensor(e!)[] steps, *, float lr, float beta1, float beta2, float eps, float weight_decay, bool maximize=False, float "
      "grad_scale=1.0) "
      "-> ()");
}

TORCH_LIBRARY_IMPL(dltrain_ext, CPU, library) { library.impl("adamw_", adamw_op); }

}  // namespace

void bind_adamw(py::module_& module) {
  py::class_<AdamWGroup>(module, "AdamWGroup")
      .def(py::init<>())
      .def("gather", &AdamWGroup::gather, py::arg("state"), py::arg("params"), py::arg("amsgrad"))
      .def("step", &AdamWGroup::step, py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("maximize"), py::arg("grad_scale"));
}

}  // namespace dltrain::bindings
