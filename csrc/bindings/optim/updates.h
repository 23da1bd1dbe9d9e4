#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/place.h"
#include "core/tensor_list.h"
#include "kernels/scalars.h"

namespace dltrain::bindings {

namespace detail {

inline bool same_shape(const at::Tensor& a, const at::Tensor& b) {
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

inline at::Tensor resolved(const at::Tensor& lazy) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::empty(lazy.sizes(), lazy.options()).copy_(lazy);
}

inline bool has_type(const c10::TensorImpl& impl, bool may_be_half) {
  return impl.dtype() == caffe2::TypeMeta::Make<float>() ||
         (may_be_half && (impl.dtype() == caffe2::TypeMeta::Make<at::Half>() || impl.dtype() == caffe2::TypeMeta::Make<at::BFloat16>()));
}

inline bool fits(const at::Tensor& tensor, const at::Tensor& param, bool may_be_half) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.device() == param.device() && is_supported(impl.device()) && impl.layout() == at::kStrided && !tensor.is_nested() &&
         !impl.is_python_dispatch() && !is_lazy(tensor) && has_type(impl, may_be_half) && same_shape(tensor, param) && is_backed(tensor);
}

inline bool counts(const at::Tensor& step, const at::Tensor& param) {
  return step.layout() == at::kStrided && !step.is_nested() && !is_lazy(step) && step.scalar_type() == at::kFloat &&
         step.device() == param.device() && step.numel() == 1;
}

}  // namespace detail

// Throws naming the tensor, what was expected and what came, unless it can take part in the update of param.
[[noreturn]] void refuse(const at::Tensor& tensor, const char* name, int64_t index, const at::Tensor& param, bool may_be_half);
inline void check_tensor(const at::Tensor& tensor, const char* name, int64_t index, const at::Tensor& param, bool may_be_half) {
  if (!detail::fits(tensor, param, may_be_half)) refuse(tensor, name, index, param, may_be_half);
}
// The same for a step count.
void check_step(const at::Tensor& step, int64_t index, const at::Tensor& param);
// Of any type and on any device, as another optimizer may have saved it: that it is a number.
void check_foreign_step(const at::Tensor& step, int64_t index);

// Throws naming the first of the lists that is not as long as params.
void check_lengths(at::TensorList params, std::initializer_list<std::pair<const char*, at::TensorList>> lists);

// A list that is empty where its tensors are not wanted.
inline const at::Tensor* at_or_null(at::TensorList list, size_t index) { return list.empty() ? nullptr : &list[index]; }

// What a step is given beside the tensors of its parameters. Numbers that are tensors are read where they lie, or brought to the device
// of the parameters without waiting for them.
class StepArguments {
 public:
  StepArguments(double lr, bool maximize, std::optional<at::Tensor> tensor_lr, std::optional<at::Tensor> grad_scale,
                std::optional<at::Tensor> found_inf);
  Step on(const at::Device& device);

 private:
  template <class T>
  const T* number(const std::optional<at::Tensor>& given, const at::Device& device);

  double lr_;
  bool maximize_;
  std::optional<at::Tensor> tensor_lr_, grad_scale_, found_inf_;
  std::vector<at::Tensor> brought_;
};

// The gradients of one or several fused steps, by device.
class Gradients {
 public:
  struct OnDevice {
    at::Device device;
    std::vector<TensorList<1>> lists;
  };

  std::vector<TensorList<1>>& on(const at::Device& device) {
    for (OnDevice& one : devices_) {
      if (one.device == device) return one.lists;
    }
    return devices_.emplace_back(OnDevice{device, {}}).lists;
  }
  auto begin() const { return devices_.begin(); }
  auto end() const { return devices_.end(); }

 private:
  std::vector<OnDevice> devices_;
};

// as_it_lies: only where that takes no more than reading the tensors, without the GIL, without any copy; any: else too, with errors for
// what does not fit.
enum class Manner { as_it_lies, any };

// The updates of one fused step: for each parameter K tensors, itself first, its gradient second, then its state. The vectors are reused
// from step to step; the caller keeps the tensors alive.
template <int K>
class Updates {
 public:
  using Tensors = std::array<const at::Tensor*, K>;
  using Names = std::array<const char*, K>;  // of the tensors, in errors

  explicit Updates(const Names& names) : names_(names) {}

  void clear() {
    for (Part& part : parts_) {
      part.list.clear();
      part.steps.clear();
    }
    params_.clear();
    dense_grads_.clear();
    copies_.clear();
  }

  // master: the fp32 tensor that is updated in the parameter's place, the parameter becoming a copy of it; step: the one that counts the
  // parameter's steps. Null if there is none. Returns whether the manner allowed it; else nothing is done.
  bool add(Tensors tensors, const at::Tensor* master, const at::Tensor* step, int64_t index, Manner manner) {
    const at::Tensor& param = *tensors[0];
    if (manner == Manner::as_it_lies) {
      if (!fit(tensors, master, step) || !one_layout(tensors, master)) return false;
    } else {
      if (detail::is_lazy(*tensors[1])) tensors[1] = &dense_grads_.emplace_back(detail::resolved(*tensors[1]));
      for (int k = 0; k < K; ++k) check_tensor(*tensors[k], names_[k], index, param, may_be_half(k));
      if (master) check_tensor(*master, "masters", index, param, /*may_be_half=*/false);
      if (step) check_step(*step, index, param);
    }

    const bool in_place = manner == Manner::as_it_lies || one_layout(tensors, master);
    if (!in_place) {  // what is written by a copy must have a place for each element
      for (int k = 0; k < K; ++k) {
        if (k != 1) check_written(*tensors[k], c10::str(names_[k], "[", index, "]"));
      }
      if (master) check_written(*master, c10::str("masters[", index, "]"));
    }
    const auto written = [&](const at::Tensor& tensor) { return (in_place ? tensor : copy(tensor)).mutable_data_ptr(); };
    Form<K> form;
    std::array<void*, K> data{};
    for (int k = 0; k < K; ++k) {
      const at::Tensor& tensor = master && k == 0 ? *master : *tensors[k];
      form.dtypes[k] = dtype_of(tensor);
      if (k == 1) {
        // Kernels only read the gradient; the list has one pointer type for all its streams.
        data[k] = const_cast<void*>((in_place ? tensor : dense_grads_.emplace_back(tensor.contiguous())).const_data_ptr());
      } else {
        data[k] = written(tensor);
      }
    }
    form.copies = master;
    if (master) form.copy = dtype_of(param);
    void* const count = step ? step->mutable_data_ptr() : nullptr;
    Part& part = of(param.device(), form);
    part.list.add(data, param.numel(), count, master ? written(param) : nullptr);
    if (count) part.steps.extend({count}, 1);
    params_.push_back(param.unsafeGetTensorImpl());
    return true;
  }

  // Of others that have been added as they lie.
  void append(const Updates& others) {
    for (const Part& part : others.parts_) {
      if (part.list.size() == 0) continue;
      Part& ours = of(part.device, part.list.form());
      ours.list.append(part.list);
      ours.steps.append(part.steps);
    }
    params_.insert(params_.end(), others.params_.begin(), others.params_.end());
  }

  void collect(Gradients& into) const {
    for (const Part& part : parts_) {
      if (part.list.size() > 0) into.on(part.device).push_back(part.list.stream(1));
    }
  }

  // Calls update(place, device, list, steps) for each device and form, and makes what it wrote known.
  template <class Update>
  void run(Update&& update) {
    for (Part& part : parts_) {
      if (part.list.size() == 0) continue;
      const c10::OptionalDeviceGuard guard(part.device.is_cpu() ? std::nullopt : std::make_optional(part.device));
      update(caller_place(part.device), part.device, part.list, part.steps);
    }
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& [original, copy] : copies_) original.copy_(copy);
    // So that autograd notices where a graph still needs the old values.
    for (c10::TensorImpl* param : params_) {
      if (!param->is_inference()) param->bump_version();
    }
  }

 private:
  struct Part {
    at::Device device;
    TensorList<K> list;
    TensorList<1> steps;
  };

  Part& of(const at::Device& device, const Form<K>& form) {
    for (Part& part : parts_) {
      if (part.device == device && part.list.form() == form) return part;
    }
    return parts_.emplace_back(Part{device, TensorList<K>(form), TensorList<1>()});
  }

  static bool may_be_half(int k) { return k < 2; }

  // Asking for its memory changes nothing, as it would where that is another tensor's until somebody writes.
  static bool has_memory(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    return impl.has_storage() && !awaits_memory(*impl.unsafe_storage().unsafeGetStorageImpl());
  }

  // torch before 2.13 has no such storages, nor the question. A template, since only there a requirement may fail.
  template <class Storage>
  static bool awaits_memory(const Storage& storage) {
    if constexpr (requires { storage.has_materializer(); }) return storage.has_materializer();
    return false;
  }

  static bool fit(const Tensors& tensors, const at::Tensor* master, const at::Tensor* step) {
    const at::Tensor& param = *tensors[0];
    for (int k = 0; k < K; ++k) {
      if (!detail::fits(*tensors[k], param, may_be_half(k)) || !has_memory(*tensors[k])) return false;
    }
    return (!master || (detail::fits(*master, param, false) && has_memory(*master))) &&
           (!step || (detail::counts(*step, param) && is_backed(*step) && has_memory(*step)));
  }

  // The same element at the same offset in all tensors, with nothing in between: then the update may walk through memory.
  static bool one_layout(const Tensors& tensors, const at::Tensor* master) {
    const auto all = [&](auto&& holds) {
      return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor* t) { return holds(*t); }) && (!master || holds(*master));
    };
    const at::Tensor& param = *tensors[0];
    return all([](const at::Tensor& t) { return t.is_contiguous(); }) ||
           (param.is_non_overlapping_and_dense() && all([&](const at::Tensor& t) { return t.strides() == param.strides(); }));
  }

  const at::Tensor& copy(const at::Tensor& tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return copies_.emplace_back(tensor, tensor.clone(at::MemoryFormat::Contiguous)).second;
  }

  Names names_;
  std::vector<Part> parts_;
  std::vector<c10::TensorImpl*> params_;
  std::deque<at::Tensor> dense_grads_;
  std::deque<std::pair<at::Tensor, at::Tensor>> copies_;  // written back after the step
};

// The updates of an optimizer's step, of several kinds.
template <int... K>
class KindsOfUpdates {
 public:
  explicit KindsOfUpdates(const typename Updates<K>::Names&... names) : kinds_(Updates<K>(names)...) {}

  void clear() {
    std::apply([](auto&... kind) { (kind.clear(), ...); }, kinds_);
  }
  void collect(Gradients& into) const {
    std::apply([&](const auto&... kind) { (kind.collect(into), ...); }, kinds_);
  }
  void append(const KindsOfUpdates& others) { append(others, std::make_index_sequence<sizeof...(K)>()); }

 protected:
  template <std::size_t kind>
  auto& of() {
    return std::get<kind>(kinds_);
  }

 private:
  template <std::size_t... I>
  void append(const KindsOfUpdates& others, std::index_sequence<I...>) {
    (std::get<I>(kinds_).append(std::get<I>(others.kinds_)), ...);
  }

  std::tuple<Updates<K>...> kinds_;
};

}  // namespace dltrain::bindings
