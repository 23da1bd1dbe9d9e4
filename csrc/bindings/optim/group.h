#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "bindings/module.h"
#include "bindings/optim/members.h"
#include "bindings/optim/prefetcher.h"
#include "bindings/optim/updates.h"

namespace dltrain::bindings {

// A parameter group of an optimizer, which is read anew for each step.
class FusedGroup {
 public:
  virtual ~FusedGroup() = default;

  // Reads the parameters that have a gradient. Returns the parameters whose gradient is sparse (COO), which are not read, and those whose
  // state is incomplete: the caller completes it, and calls gather again. optional: the keys of the optional states that the group has. The
  // rule's flag is set for the parameters in `flagged`, and for those of at least flagged_from dimensions. runs: of each parameter, or none
  // if all parameters are whole (Reading). numbers: those of the parameters, if they are rounded stochastically, else none.
  virtual py::list gather(const py::dict& state, const py::list& params, bool masters, const std::vector<std::string>& optional,
                          const py::list& flagged, int64_t flagged_from, const std::vector<std::optional<at::Tensor>>& runs,
                          const std::vector<uint32_t>& numbers) = 0;
  virtual void collect(Gradients& into) const = 0;
  // Computes the norms that step() would otherwise compute itself. sums: float64 zeros, [parameters, norms], on the device of all
  // parameters. step() reads them, so that the caller may add to them before: for a parameter that is a part of a tensor, the sums of the
  // other parts.
  virtual void take_norms(const StepArguments& arguments, const py::dict& hyper, const at::Tensor& sums) = 0;
  virtual void step(const StepArguments& arguments, const py::dict& hyper) = 0;
  virtual void release() = 0;
};

// The common part of the groups of all optimizers. Users may add, remove or replace parameters, and edit the state, so all of it is read
// anew in every step: first Python's dicts, then the tensors, by several threads.
//
// `Updates` holds the updates of one step, and has clear(), append(others), collect(into), take_norms(rule, arguments, sums) and
// run(rule, arguments).
template <class Updates>
class GroupOf : public FusedGroup {
 public:
  // keys: those of a parameter's entry in the optimizer's state, counters first.
  explicit GroupOf(const std::array<const char*, Updates::keys>& keys) : keys_(keys), members_(keys) {}

  void collect(Gradients& into) const override {
    ranges_.front().updates.collect(into);
    for (const at::Tensor& grad : starting_grads_) {
      TensorList<1> list(Signature<1>{{dtype_of(grad)}});
      list.add({const_cast<void*>(grad.const_data_ptr())}, grad.numel());
      into.on(grad.device()).push_back(std::move(list));
    }
  }

  void release() override {
    for (Range& range : ranges_) range.clear();
    starting_grads_.clear();
    members_.release();
  }

 protected:
  template <class Rule>
  void take_norms_of(const Rule& rule, StepArguments arguments, const at::Tensor& sums) {
    const at::IntArrayRef shape = sums.sizes();
    TORCH_CHECK_VALUE(sums.is_contiguous() && shape == at::IntArrayRef({static_cast<int64_t>(members_.size()), math::norms_of<Rule>()}),
                      "sums: expected a contiguous tensor of ", members_.size(), " x ", math::norms_of<Rule>(), ", got shape ", shape);
    py::gil_scoped_release no_gil;
    ranges_.front().updates.take_norms(rule, arguments, sums);
  }

  template <class Rule>
  void run(const Rule& rule, StepArguments arguments) {
    {
      py::gil_scoped_release no_gil;
      ranges_.front().updates.run(rule, arguments);
    }
    release();
  }

  // Calls take(updates, index, reading, layouts) for each parameter that has a dense gradient and a complete state; returns the others that
  // have a gradient. keys: the bits of the keys that an entry must have.
  template <class Take>
  py::list read_all(const py::dict& state, const py::list& params, unsigned keys, bool masters, Take&& take) {
    release();
    members_.look_up(state, params, keys);
    prefetcher_.resize(members_.size());
    const size_t ranges = (members_.size() + per_range - 1) / per_range;
    if (ranges_.size() < ranges) ranges_.resize(ranges);
    // The workers only read: this thread holds the GIL, so a worker that needs it would wait for ever.
    caller_context(at::kCPU).parallel_for(static_cast<int64_t>(ranges), 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const size_t first = r * per_range, last = std::min(first + per_range, members_.size());
        for (size_t index = first; index < last; ++index) {
          if (index + 2 < last) prefetcher_.fetch(index + 2);
          if (!take_in_place(ranges_[r], index, keys, masters, take)) ranges_[r].others.push_back(index);
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
    std::vector<size_t> others;     // parameters that need take_any
    std::vector<at::Tensor> grads;  // to keep them alive

    void clear() {
      updates.clear();
      others.clear();
      grads.clear();
    }
  };

  template <class Take>
  bool take_in_place(Range& range, size_t index, unsigned keys, bool masters, Take&& take) {
    if (!is_tensor(members_[index].param)) return false;
    const Reading<Updates::keys> reading = read(index, keys, masters);
    if (!reading.grad->defined()) return true;
    if (!reading.complete || reading.asks_python() || !take(range.updates, index, reading, Layouts::in_place)) return false;
    prefetcher_.note(index, reading);
    range.grads.push_back(*reading.grad);
    return true;
  }

  template <class Take>
  bool take_any(size_t index, unsigned keys, bool masters, Take&& take) {
    PyObject* const object = members_[index].param;
    TORCH_CHECK_TYPE(is_tensor(object), "params[", index, "]: expected a tensor, got ", Py_TYPE(object)->tp_name);
    const Reading<Updates::keys> reading = read(index, keys, masters);
    const at::Tensor &param = *reading.param, &grad = *reading.grad;
    if (grad.layout() == at::kSparse) {
      check_tensor(param, "params", index, param, true);
      return false;
    }
    if (reading.complete && is_counted(reading)) {
      take(ranges_.front().updates, index, reading, Layouts::any);
      ranges_.front().grads.push_back(grad);
      return true;
    }
    for (int i = 0; i < Updates::counters; ++i) {
      if (reading.values[i]) check_foreign_counter(*reading.values[i], std::string(keys_[i]) + "s", index);
    }
    check_tensor(param, "params", index, param, true);
    check_written(param, c10::str("params[", index, "]"));
    if (!detail::is_lazy(grad)) check_tensor(grad, "grads", index, param, true);
    starting_grads_.push_back(detail::is_lazy(grad) ? detail::resolved(grad) : grad.contiguous());
    return false;
  }

  Reading<Updates::keys> read(size_t index, unsigned keys, bool masters) const {
    const Member<Updates::keys>& member = members_[index];
    const auto tensor = [](PyObject* object) { return object && is_tensor(object) ? &THPVariable_Unpack(object) : nullptr; };
    const at::Tensor& param = THPVariable_Unpack(member.param);
    Reading<Updates::keys> reading{&param, &param.unsafeGetTensorImpl()->grad(), {}, nullptr, true};
    for (size_t k = 0; k < Updates::keys; ++k) {
      if (keys >> k & 1) reading.complete &= (reading.values[k] = tensor(member.values[k])) != nullptr;
    }
    if (masters && dtype_of(param) != Dtype::fp32) reading.complete &= (reading.master = tensor(member.master)) != nullptr;
    return reading;
  }

  // Whether the counters have the right type and device. Otherwise, as another optimizer may have saved them, they are converted first.
  static bool is_counted(const Reading<Updates::keys>& reading) {
    return std::all_of(reading.values.begin(), reading.values.begin() + Updates::counters, [&](const at::Tensor* counter) {
      return counter->scalar_type() == at::kFloat && counter->device() == reading.param->device();
    });
  }

  const std::array<const char*, Updates::keys> keys_;
  Members<Updates::keys> members_;
  Prefetcher<Updates::keys> prefetcher_;
  std::vector<Range> ranges_ = std::vector<Range>(1);  // the updates of all are appended to the first one
  std::vector<at::Tensor> starting_grads_;
};

}  // namespace dltrain::bindings
