#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <vector>

#include "bindings/module.h"
#include "bindings/trail.h"
#include "bindings/updates.h"

namespace dltrain::bindings {

// A parameter group of an optimizer, as it has been read for one step.
class FusedGroup {
 public:
  virtual ~FusedGroup() = default;
  virtual void collect(Gradients& into) const = 0;
};

// Reads a parameter group of an optimizer from Python's objects, anew at every step: parameters may come, go or be replaced, and state may
// be edited by hand. Keeps what it has read alive until release().
class GroupReader {
 public:
  // What a parameter's entry in the optimizer's state is made of; "step", where it stands, comes first.
  explicit GroupReader(const std::vector<const char*>& keys) {
    for (const char* key : keys) keys_.push_back(interned(key));
    has_step_ = std::string("step") == keys.front();
  }

  // Calls take(index, param, grad, values of the first `keys` keys, master) for each parameter with a gradient; master is null where there
  // is none, as `masters` or the parameter's type has it. Those whose state is incomplete are returned instead: the caller completes it
  // and gathers again.
  template <class Take>
  py::list gather(const py::dict& state, const py::list& params, size_t keys, bool masters, Take&& take) {
    release();
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
      const bool has_master = masters && dtype_of(param) != Dtype::fp32;
      PyObject* const entry = keys > 0 || has_master ? state_of(state.ptr(), object) : nullptr;
      std::array<const at::Tensor*, max_keys> values{};
      bool complete = true;
      for (size_t key = 0; key < keys; ++key) complete &= (values[key] = find(entry, keys_[key])) != nullptr;
      const at::Tensor* const master = has_master ? find(entry, master_key_) : nullptr;
      complete &= !has_master || master;
      if (complete && has_step_) complete = values[0]->scalar_type() == at::kFloat && values[0]->device() == param.device();
      if (complete) {
        take(index, param, grad, values, master);
        trail_.note(object, entry);
        trail_.note({&param, &grad});
        trail_.note(values.data(), std::min<size_t>(keys, 3));
        alive_.push_back(py::reinterpret_borrow<py::object>(object));
        alive_grads_.push_back(grad);
      } else {
        check_tensor(param, "params", index, param, true);
        if (!detail::is_lazy(grad)) check_tensor(grad, "grads", index, param, true);
        incomplete.append(py::reinterpret_borrow<py::object>(object));
        starting_grads_.push_back(detail::is_lazy(grad) ? detail::resolved(grad) : grad.contiguous());
      }
    }
    return incomplete;
  }

  // The gradients of those whose state is incomplete.
  void collect_starting(Gradients& into) const {
    for (const at::Tensor& grad : starting_grads_) {
      TensorList<1> list(Form<1>{{dtype_of(grad)}});
      list.add({const_cast<void*>(grad.const_data_ptr())}, grad.numel());
      into.on(grad.device()).push_back(std::move(list));
    }
  }

  void release() {
    alive_.clear();
    alive_grads_.clear();
    starting_grads_.clear();
  }

 private:
  static constexpr size_t max_keys = 4;

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

  const at::Tensor* find(PyObject* entry, const py::object& key) {
    PyObject* const value = entry && PyDict_Check(entry) ? PyDict_GetItemWithError(entry, key.ptr()) : nullptr;
    if (!value || !is_tensor(value)) return nullptr;
    alive_.push_back(py::reinterpret_borrow<py::object>(value));
    return &THPVariable_Unpack(value);
  }

  std::vector<py::object> keys_;
  py::object master_key_ = interned("master_param");
  bool has_step_;
  // What the rows point into: another thread may drop it while the kernel runs without the GIL.
  std::vector<py::object> alive_;
  std::vector<at::Tensor> alive_grads_;
  std::vector<at::Tensor> starting_grads_;
  Trail trail_;
};

// What the groups of all optimizers do alike. Updates has clear(), collect(into) and run(hyper, arguments).
template <class Updates>
class GroupOf : public FusedGroup {
 public:
  explicit GroupOf(const std::vector<const char*>& keys) : reader_(keys) {}

  void collect(Gradients& into) const override {
    updates_.collect(into);
    reader_.collect_starting(into);
  }

  template <class Hyper>
  void step(const Hyper& hyper, StepArguments arguments) {
    {
      py::gil_scoped_release no_gil;
      updates_.run(hyper, arguments);
    }
    release();
  }

  void release() {
    updates_.clear();
    reader_.release();
  }

 protected:
  Updates updates_;
  GroupReader reader_;
};

}  // namespace dltrain::bindings
