#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "bindings/module.h"
#include "bindings/optim/members.h"
#include "bindings/optim/trail.h"
#include "bindings/optim/updates.h"

namespace dltrain::bindings {

// A parameter group of an optimizer, as it has been read for one step.
class FusedGroup {
 public:
  virtual ~FusedGroup() = default;
  virtual void collect(Gradients& into) const = 0;
};

// A parameter, its gradient, which may be undefined, and what the optimizer's state has of it.
struct Reading {
  const at::Tensor* param;
  const at::Tensor* grad;
  std::array<const at::Tensor*, Member::max_keys> values;
  const at::Tensor* master;  // where it shall have one; else null
  bool complete;             // nothing is missing

  // Whether one is of a Python class that answers for its sizes or device.
  bool asks_python() const {
    const auto asks = [](const at::Tensor* tensor) { return tensor && tensor->unsafeGetTensorImpl()->is_python_dispatch(); };
    return asks(param) || asks(grad) || std::any_of(values.begin(), values.end(), asks) || asks(master);
  }
};

// What the groups of all optimizers do alike. Parameters may come, go or be replaced, and state may be edited by hand, so all of it is read
// anew at every step: Python's dicts first, then the tensors, by several threads.
//
// Updates holds the updates of one step, and has clear(), append(others), collect(into) and run(hyper, arguments).
template <class Updates>
class GroupOf : public FusedGroup {
 public:
  // What a parameter's entry in the optimizer's state is made of; "step", where it stands, comes first.
  explicit GroupOf(const std::vector<const char*>& keys) : members_(keys), has_step_(std::string("step") == keys.front()) {}

  void collect(Gradients& into) const override {
    ranges_.front().updates.collect(into);
    for (const at::Tensor& grad : starting_grads_) {
      TensorList<1> list(Form<1>{{dtype_of(grad)}});
      list.add({const_cast<void*>(grad.const_data_ptr())}, grad.numel());
      into.on(grad.device()).push_back(std::move(list));
    }
  }

  template <class Hyper>
  void step(const Hyper& hyper, StepArguments arguments) {
    {
      py::gil_scoped_release no_gil;
      ranges_.front().updates.run(hyper, arguments);
    }
    release();
  }

  void release() {
    for (Range& range : ranges_) range.clear();
    starting_grads_.clear();
    members_.release();
  }

 protected:
  // Calls take(updates, index, reading, manner) for each parameter with a gradient. Those whose state is incomplete are returned instead:
  // the caller completes it and gathers again.
  template <class Take>
  py::list gather(const py::dict& state, const py::list& params, size_t keys, bool masters, Take&& take) {
    release();
    members_.look_up(state, params, keys);
    trail_.resize(members_.size());
    const size_t ranges = (members_.size() + per_range - 1) / per_range;
    if (ranges_.size() < ranges) ranges_.resize(ranges);
    // Only reads: this thread holds the GIL, so a worker that asked for it would wait for ever.
    caller_place(at::kCPU).parallel_for(static_cast<int64_t>(ranges), 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const size_t first = r * per_range, last = std::min(first + per_range, members_.size());
        for (size_t index = first; index < last; ++index) {
          if (index + 2 < last) trail_.fetch(index + 2);
          if (!take_as_it_lies(ranges_[r], index, keys, masters, take)) ranges_[r].others.push_back(index);
        }
      }
    });
    members_.hold();
    py::list incomplete;
    for (size_t r = 0; r < ranges; ++r) {
      if (r > 0) ranges_.front().updates.append(ranges_[r].updates);
      for (const size_t index : ranges_[r].others) {
        if (!take_any(index, keys, masters, take)) incomplete.append(py::reinterpret_borrow<py::object>(members_[index].param));
      }
    }
    return incomplete;
  }

 private:
  static constexpr size_t per_range = 256;

  struct Range {
    Updates updates;
    std::vector<size_t> others;     // that need more than reading
    std::vector<at::Tensor> grads;  // kept alive

    void clear() {
      updates.clear();
      others.clear();
      grads.clear();
    }
  };

  template <class Take>
  bool take_as_it_lies(Range& range, size_t index, size_t keys, bool masters, Take&& take) {
    if (!is_tensor(members_[index].param)) return false;
    const Reading reading = read(index, keys, masters);
    if (!reading.grad->defined()) return true;
    if (!reading.complete || reading.asks_python() || !take(range.updates, index, reading, Manner::as_it_lies)) return false;
    const auto& [a, b, c, d] = reading.values;
    trail_.note(index, {reading.param, reading.grad, a, b, c, d, reading.master});
    range.grads.push_back(*reading.grad);
    return true;
  }

  template <class Take>
  bool take_any(size_t index, size_t keys, bool masters, Take&& take) {
    PyObject* const object = members_[index].param;
    TORCH_CHECK_TYPE(is_tensor(object), "params[", index, "]: expected a tensor, got ", Py_TYPE(object)->tp_name);
    const Reading reading = read(index, keys, masters);
    const at::Tensor &param = *reading.param, &grad = *reading.grad;
    if (reading.complete && is_counted(reading)) {
      take(ranges_.front().updates, index, reading, Manner::any);
      ranges_.front().grads.push_back(grad);
      return true;
    }
    if (has_step_ && reading.values[0]) check_foreign_step(*reading.values[0], index);
    check_tensor(param, "params", index, param, true);
    check_written(param, c10::str("params[", index, "]"));
    if (!detail::is_lazy(grad)) check_tensor(grad, "grads", index, param, true);
    starting_grads_.push_back(detail::is_lazy(grad) ? detail::resolved(grad) : grad.contiguous());
    return false;
  }

  Reading read(size_t index, size_t keys, bool masters) const {
    const Member& member = members_[index];
    const auto tensor = [](PyObject* object) { return object && is_tensor(object) ? &THPVariable_Unpack(object) : nullptr; };
    const at::Tensor& param = THPVariable_Unpack(member.param);
    Reading reading{&param, &param.unsafeGetTensorImpl()->grad(), {}, nullptr, true};
    for (size_t k = 0; k < keys; ++k) reading.complete &= (reading.values[k] = tensor(member.values[k])) != nullptr;
    if (masters && dtype_of(param) != Dtype::fp32) reading.complete &= (reading.master = tensor(member.master)) != nullptr;
    return reading;
  }

  // Else its step count, as another optimizer may have saved it, is first brought where it belongs.
  bool is_counted(const Reading& reading) const {
    return !has_step_ || (reading.values[0]->scalar_type() == at::kFloat && reading.values[0]->device() == reading.param->device());
  }

  Members members_;
  bool has_step_;
  Trail trail_;
  std::vector<Range> ranges_ = std::vector<Range>(1);  // the first one has it all in the end
  std::vector<at::Tensor> starting_grads_;
};

}  // namespace dltrain::bindings
