#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/COW.h>

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "bindings/execution_context.h"
#include "bindings/optim/checks.h"
#include "bindings/optim/step.h"
#include "core/tensor_list.h"
#include "kernels/norms.h"
#include "kernels/reduce.h"
#include "kernels/take_step.h"
#include "kernels/update.h"

namespace dltrain::bindings {

// in_place: only tensors that are updated in place, which needs neither the GIL nor a copy; any: also other tensors, with an error for
// those that cannot be used.
enum class Layouts { in_place, any };

// A parameter, its gradient, which may be undefined, and its tensors in the optimizer's state.
template <size_t keys>
struct Reading {
  const at::Tensor* param;
  const at::Tensor* grad;
  std::array<const at::Tensor*, keys> values;  // the rule's counters, then its states; null if not used
  // The fp32 tensor that is updated instead of the parameter; or eight more bits of each element of the parameter, as bytes; may be null.
  const at::Tensor* master;
  bool complete;  // whether all tensors exist
  // Of a parameter that is a part of a larger tensor, if its elements' indices matter: int64, [runs, 2], for each run of its elements that
  // are adjacent in the larger tensor, in order: the index there of the first one, and how many they are. Null: it is whole.
  const at::Tensor* runs = nullptr;
  bool stochastic = false;  // whether a half parameter without a master is rounded stochastically
  uint32_t number = 0;      // of the parameter, for its random numbers

  bool is_extended() const { return master && is_coded(*master); }
  bool has_master() const { return master && !is_coded(*master); }
  bool is_rounded() const { return stochastic && !master && dtype_of(*param) != Dtype::fp32; }
  // Whether a tensor is of a Python class that overrides its sizes or device.
  bool asks_python() const {
    const auto asks = [](const at::Tensor* tensor) { return tensor && tensor->unsafeGetTensorImpl()->is_python_dispatch(); };
    return asks(param) || asks(grad) || std::any_of(values.begin(), values.end(), asks) || asks(master);
  }
};

template <class Rule>
inline constexpr size_t keys_count = math::counters_of<Rule>().size() + Rule::states.size();

// The names of an optimizer's lists of tensors, in errors and in its op: first those of its states, then those of its counters.
template <class Rule>
const std::vector<std::string>& lists_of() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const math::State& state : Rule::states) all.push_back(std::string(state.key) + "s");
    for (const math::Counter& counter : math::counters_of<Rule>()) all.push_back(std::string(counter.key) + "s");
    return all;
  }();
  return names;
}

// The updates of one step with these states. The vectors are reused from step to step. The caller keeps the tensors alive.
template <class Rule, unsigned bits>
class Updates {
 public:
  static constexpr unsigned states = bits;

  void clear() {
    for (DeviceList& part : parts_) {
      part.list.clear();
      part.counts.clear();
      part.indices.clear();
    }
    params_.clear();
    dense_grads_.clear();
    copies_.clear();
    sums_.reset();
  }

  // flag: the rule's flag. Returns whether `layouts` allows this update; if not, nothing is added.
  bool add(const Reading<keys_count<Rule>>& reading, bool flag, int64_t index, Layouts layouts) {
    Tensors tensors = {reading.param, reading.grad};
    for (int k = 2; k < K; ++k) tensors[k] = reading.values[counters + Operation::state_of[k]];
    const at::Tensor& param = *reading.param;
    const at::Tensor* const master = reading.has_master() ? reading.master : nullptr;
    const at::Tensor* const more = reading.is_extended() ? reading.master : nullptr;
    if (layouts == Layouts::in_place) {
      if (!fit(tensors, reading) || !one_layout(tensors, reading)) return false;
    } else {
      if (detail::is_lazy(*tensors[1])) tensors[1] = &dense_grads_.emplace_back(detail::resolved(*tensors[1]));
      for (int k = 0; k < K; ++k) {
        if (has_codes(tensors, k)) {
          check_codes(*tensors[k], name(k), index, param);
        } else {
          check_tensor(*tensors[k], name(k), index, param, may_be_half(k));
        }
      }
      if (master) check_tensor(*master, "masters", index, param, /*may_be_half=*/false);
      if (more) check_extension(*more, "masters", index, param, math::is_compact<Rule>());
      if (reading.is_rounded()) check_stochastic(param, "params", index);
      for (int i = 0; i < counters; ++i) check_counter(*reading.values[i], lists_of<Rule>()[Rule::states.size() + i], index, param);
    }

    const bool in_place = layouts == Layouts::in_place || one_layout(tensors, reading);
    if (!in_place) {  // a copy is written back, so each element must have memory of its own
      for (int k = 0; k < K; ++k) {
        if (k != 1) check_written(*tensors[k], c10::str(name(k), "[", index, "]"));
      }
      if (reading.master) check_written(*reading.master, c10::str("masters[", index, "]"));
    }
    const auto written = [&](const at::Tensor& tensor) { return (in_place ? tensor : copy(tensor)).mutable_data_ptr(); };
    Signature<K> signature;
    std::array<void*, K> data{};
    for (int k = 0; k < K; ++k) {
      const at::Tensor& tensor = master && k == 0 ? *master : *tensors[k];
      const bool coded = has_codes(tensors, k);
      signature.formats[k] = coded ? codes_of(Rule::states[Operation::state_of[k]].nonnegative) : Format(dtype_of(tensor));
      if (coded) {
        data[k] = tensor.mutable_data_ptr();
      } else if (k == 1) {
        // Kernels only read the gradient; the list has one pointer type for all its streams.
        data[k] = const_cast<void*>((in_place ? tensor : dense_grads_.emplace_back(tensor.contiguous())).const_data_ptr());
      } else {
        data[k] = written(tensor);
      }
    }
    if (more) signature.formats[0].narrowing = Narrowing::extended;
    if (reading.is_rounded()) signature.formats[0].narrowing = Narrowing::stochastic;
    signature.copies = master;
    if (master) signature.copy = dtype_of(param);
    DeviceList& part = of(param.device(), signature, flag);
    typename Operation::Numbers numbers;
    if constexpr (counters > 0) {
      std::array<void*, counters> counts{};
      for (int i = 0; i < counters; ++i) {
        counts[i] = reading.values[i]->mutable_data_ptr();
        numbers.counters().values[i] = static_cast<const float*>(counts[i]);
      }
      part.counts.extend(counts, 1);
    }
    if constexpr (math::is_compact<Rule>()) numbers.number = reading.number;
    void* const beside = master ? written(param) : more ? written(*more) : nullptr;
    if (reading.runs && (math::is_indexed<Rule>() || reading.is_rounded())) {
      TORCH_CHECK_VALUE(reading.runs->size(0) == 1 || (norms == 0 && !any_codes(tensors)), "params[", index,
                        "]: expected a part whose elements are adjacent in the whole tensor, for stochastic rounding with ",
                        norms > 0 ? "norms" : "codes", ", got one of ", reading.runs->size(0), " runs");
      add_runs(part.list, data, *reading.runs, numbers, beside);
    } else {
      part.list.add(data, param.numel(), numbers, beside);
    }
    if constexpr (norms > 0) part.indices.push_back(index);
    params_.push_back(param.unsafeGetTensorImpl());
    return true;
  }

  // Adds the updates of another object, which have all been added in place.
  void append(const Updates& others) {
    for (const DeviceList& part : others.parts_) {
      if (part.list.size() == 0) continue;
      DeviceList& own = of(part.device, part.list.signature(), part.flag);
      own.list.append(part.list);
      own.counts.append(part.counts);
      own.indices.insert(own.indices.end(), part.indices.begin(), part.indices.end());
    }
    params_.insert(params_.end(), others.params_.begin(), others.params_.end());
  }

  void collect(Gradients& into) const {
    for (const DeviceList& part : parts_) {
      if (part.list.size() > 0) into.on(part.device).push_back(part.list.stream(1));
    }
  }

  // Computes the norms that the rule needs for the updates, which read them in run(): those of the parameter with an index at sums[index].
  // sums: float64, [parameters, norms]; rows of parameters that have no norms are not written.
  void take_norms(const Rule& rule, StepArguments& arguments, const at::Tensor& sums) {
    if constexpr (norms > 0) {
      for (DeviceList& part : parts_) {
        if (part.list.size() == 0 || !part.flag) continue;
        TORCH_CHECK_VALUE(sums.device() == part.device, "sums: expected a tensor on ", part.device, ", got one on ", sums.device());
        const auto guard = on_device(part.device);
        auto* const first = sums.mutable_data_ptr<double>();
        for (int64_t row = 0; row < part.list.size(); ++row) part.list.row(row).numbers.sums = first + part.indices[row] * norms;
        reduce(caller_context(part.device), part.list, Norms<Rule, bits>{rule, arguments.on(part.device)});
      }
      sums_ = sums;
    }
  }

  // Runs the updates, and increments the versions of the parameters.
  void run(const Rule& rule, StepArguments& arguments) {
    for (DeviceList& part : parts_) {
      if (part.list.size() == 0) continue;
      const auto guard = on_device(part.device);
      const ExecutionContext context = caller_context(part.device);
      take_step<Rule, bits>(context, rule, arguments.on(part.device), part.flag, part.list, part.counts);
    }
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& [original, copy] : copies_) original.copy_(copy);
    // Autograd then notices if a graph still needs the old values.
    for (c10::TensorImpl* param : params_) {
      if (!param->is_inference()) param->bump_version();
    }
  }

 private:
  using Operation = Update<Rule, bits>;
  static constexpr int K = Operation::streams;
  static constexpr int counters = static_cast<int>(math::counters_of<Rule>().size()), norms = math::norms_of<Rule>();
  using Tensors = std::array<const at::Tensor*, K>;

  struct DeviceList {
    at::Device device;
    bool flag;
    ListOf<Operation> list;
    CountersOf<Rule> counts;
    std::vector<int64_t> indices;  // of the parameters, if the rule has norms
  };

  DeviceList& of(const at::Device& device, const Signature<K>& signature, bool flag) {
    for (DeviceList& part : parts_) {
      if (part.device == device && part.flag == flag && part.list.signature() == signature) return part;
    }
    return parts_.emplace_back(DeviceList{device, flag, ListOf<Operation>(signature), CountersOf<Rule>(), {}});
  }

  // Adds a row for each run.
  static void add_runs(ListOf<Operation>& list, const std::array<void*, K>& data, const at::Tensor& runs,
                       typename Operation::Numbers numbers, void* beside) {
    const Signature<K>& signature = list.signature();
    const auto* run = runs.const_data_ptr<int64_t>();
    for (int64_t index = 0, at = 0; index < runs.size(0); ++index, run += 2) {
      std::array<void*, K> from;
      for (int k = 0; k < K; ++k) from[k] = TypedPointer{data[k], signature.formats[k].dtype}.from(at).data;
      if constexpr (requires { numbers.first; }) numbers.first = run[0];
      list.add(from, run[1], numbers, TypedPointer{beside, signature.copy}.from(at).data);
      at += run[1];
    }
  }

  static const char* name(int k) { return k == 0 ? "params" : k == 1 ? "grads" : lists_of<Rule>()[Operation::state_of[k]].c_str(); }

  static bool may_be_half(int k) { return k < 2; }

  static bool has_codes(const Tensors& tensors, int k) { return k >= 2 && Operation::may_be_compact(k) && is_coded(*tensors[k]); }

  static bool any_codes(const Tensors& tensors) {
    bool any = false;
    for (int k = 2; k < K; ++k) any |= has_codes(tensors, k);
    return any;
  }

  // Whether getting the pointer to the memory has no side effect. It has one if the memory is shared until the first write (copy-on-write).
  static bool has_memory(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    return impl.has_storage() && !awaits_memory(*impl.unsafe_storage().unsafeGetStorageImpl());
  }

  // Before version 2.13 torch has no such method. A template, because a requirement may fail only there.
  template <class Storage>
  static bool awaits_memory(const Storage& storage) {
    if constexpr (requires { storage.has_materializer(); }) return storage.has_materializer();
    return c10::impl::cow::is_cow_data_ptr(storage.data_ptr());
  }

  static bool fit(const Tensors& tensors, const Reading<keys_count<Rule>>& reading) {
    const at::Tensor& param = *tensors[0];
    for (int k = 0; k < K; ++k) {
      const bool fits = has_codes(tensors, k) ? detail::are_codes(*tensors[k], param) : detail::fits(*tensors[k], param, may_be_half(k));
      if (!fits || !has_memory(*tensors[k])) return false;
    }
    for (int i = 0; i < counters; ++i) {
      const at::Tensor& counter = *reading.values[i];
      if (!detail::counts(counter, param) || !is_backed(counter) || !has_memory(counter)) return false;
    }
    if (reading.is_rounded() && !detail::may_be_stochastic(param)) return false;
    if (reading.is_extended()) return math::is_compact<Rule>() && detail::extends(*reading.master, param) && has_memory(*reading.master);
    return !reading.master || (detail::fits(*reading.master, param, false) && has_memory(*reading.master));
  }

  // Whether all tensors have the same element at the same offset, without gaps: then the update can process memory linearly. Codes, and
  // rules and random numbers that depend on the index of an element, need memory in the order of the indices.
  static bool one_layout(const Tensors& tensors, const Reading<keys_count<Rule>>& reading) {
    const at::Tensor* const master = reading.master;
    const bool in_order = any_codes(tensors) || math::is_indexed<Rule>() || reading.is_rounded();
    const auto all = [&](auto&& holds) {
      return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor* t) { return holds(*t); }) && (!master || holds(*master));
    };
    const at::Tensor& param = *tensors[0];
    return all([](const at::Tensor& t) { return t.is_contiguous(); }) ||
           (!in_order && param.is_non_overlapping_and_dense() && all([&](const at::Tensor& t) { return t.strides() == param.strides(); }));
  }

  const at::Tensor& copy(const at::Tensor& tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return copies_.emplace_back(tensor, tensor.clone(at::MemoryFormat::Contiguous)).second;
  }

  std::vector<DeviceList> parts_;
  std::vector<c10::TensorImpl*> params_;
  std::deque<at::Tensor> dense_grads_;
  at::Tensor sums_;                                       // to which rows point after take_norms
  std::deque<std::pair<at::Tensor, at::Tensor>> copies_;  // written back after the step
};

}  // namespace dltrain::bindings
