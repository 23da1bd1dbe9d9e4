#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

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

inline bool fits(const at::Tensor& tensor, const at::Tensor& param) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.device() == param.device() && is_supported(impl.device()) && impl.layout() == at::kStrided && !impl.is_python_dispatch() &&
         !is_lazy(tensor) && impl.dtype() == caffe2::TypeMeta::Make<float>() && same_shape(tensor, param);
}

}  // namespace detail

// Throws naming the tensor, what was expected and what came, unless it can take part in the update of param.
[[noreturn]] void refuse(const at::Tensor& tensor, const char* name, int64_t index, const at::Tensor& param);
inline void check_tensor(const at::Tensor& tensor, const char* name, int64_t index, const at::Tensor& param) {
  if (!detail::fits(tensor, param)) refuse(tensor, name, index, param);
}
// The same for a step count.
void check_step(const at::Tensor& step, int64_t index, const at::Tensor& param);

// Throws naming the first of the lists that is not as long as params.
void check_lengths(at::TensorList params, std::initializer_list<std::pair<const char*, at::TensorList>> lists);

// What a step is given beside the tensors of its parameters. Numbers that are tensors are read where they lie, or brought to the device
// of the parameters without waiting for them.
class StepArguments {
 public:
  StepArguments(double lr, bool maximize, std::optional<at::Tensor> tensor_lr, std::optional<at::Tensor> grad_scale,
                std::optional<at::Tensor> found_inf);
  Step on(const at::Device& device);

 private:
  const float* number(const std::optional<at::Tensor>& given, const at::Device& device);

  double lr_;
  bool maximize_;
  std::optional<at::Tensor> tensor_lr_, grad_scale_, found_inf_;
  std::vector<at::Tensor> brought_;
};

// The updates of one fused step: for each parameter K tensors, itself first, its gradient second, then its state. The vectors are reused
// from step to step; the caller keeps the tensors alive.
template <int K>
class Updates {
 public:
  using Tensors = std::array<const at::Tensor*, K>;
  using Names = std::array<const char*, K>;  // of the tensors, in errors

  explicit Updates(const Names& names) : names_(names) {}

  void clear() {
    for (OnDevice& on : devices_) {
      on.list.clear();
      on.steps.clear();
    }
    params_.clear();
    dense_grads_.clear();
    copies_.clear();
  }

  // step: the tensor that counts the parameter's steps; null if none does.
  void add(Tensors tensors, const at::Tensor* step, int64_t index) {
    const at::Tensor& param = *tensors[0];
    if (detail::is_lazy(*tensors[1])) tensors[1] = &resolved(*tensors[1]);
    for (int k = 0; k < K; ++k) check_tensor(*tensors[k], names_[k], index, param);
    if (step) check_step(*step, index, param);

    const bool in_place = one_layout(tensors);
    std::array<float*, K> data;
    for (int k = 0; k < K; ++k) {
      if (k == 1) {
        const at::Tensor& grad = in_place ? *tensors[k] : dense_grads_.emplace_back(tensors[k]->contiguous());
        // Kernels only read the gradient; the list has one pointer type for all its streams.
        data[k] = static_cast<float*>(const_cast<void*>(grad.const_data_ptr()));
      } else {
        data[k] = static_cast<float*>((in_place ? *tensors[k] : copy(*tensors[k])).mutable_data_ptr());
      }
    }
    float* const count = step ? static_cast<float*>(step->mutable_data_ptr()) : nullptr;
    OnDevice& on = of(param.device());
    on.list.add(data, param.numel(), count);
    if (count) on.steps.add({count}, 1);
    params_.push_back(param.unsafeGetTensorImpl());
  }

  // Calls update(place, device, list, steps) for each device, and makes what it wrote known.
  template <class Update>
  void run(Update&& update) {
    for (const OnDevice& on : devices_) {
      if (on.list.size() == 0) continue;
      const c10::OptionalDeviceGuard guard(on.device.is_cpu() ? std::nullopt : std::make_optional(on.device));
      update(caller_place(on.device), on.device, on.list, on.steps);
    }
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& [original, copy] : copies_) original.copy_(copy);
    // So that autograd notices where a graph still needs the old values.
    for (c10::TensorImpl* param : params_) {
      if (!param->is_inference()) param->bump_version();
    }
  }

 private:
  struct OnDevice {
    at::Device device;
    TensorList<K> list;
    TensorList<1> steps;
  };

  OnDevice& of(const at::Device& device) {
    for (OnDevice& on : devices_) {
      if (on.device == device) return on;
    }
    return devices_.emplace_back(OnDevice{device, {}, {}});
  }

  // The same element at the same offset in all tensors, with nothing in between: then the update may walk through memory.
  static bool one_layout(const Tensors& tensors) {
    const auto all = [&](auto&& holds) {
      return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor* t) { return holds(*t); });
    };
    const at::Tensor& param = *tensors[0];
    return all([](const at::Tensor& t) { return t.is_contiguous(); }) ||
           (param.is_non_overlapping_and_dense() && all([&](const at::Tensor& t) { return t.strides() == param.strides(); }));
  }

  const at::Tensor& resolved(const at::Tensor& grad) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return dense_grads_.emplace_back(at::empty(grad.sizes(), grad.options()).copy_(grad));
  }

  const at::Tensor& copy(const at::Tensor& tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return copies_.emplace_back(tensor, tensor.clone(at::MemoryFormat::Contiguous)).second;
  }

  Names names_;
  std::vector<OnDevice> devices_;
  std::vector<c10::TensorImpl*> params_;
  std::deque<at::Tensor> dense_grads_;
  std::deque<std::pair<at::Tensor, at::Tensor>> copies_;  // written back after the step
};

}  // namespace dltrain::bindings
