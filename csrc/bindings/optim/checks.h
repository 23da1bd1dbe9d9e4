#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "bindings/arguments.h"
#include "bindings/optim/states.h"

// Checks of the tensors that are used in the update of a parameter.

namespace dltrain::bindings {

namespace detail {

inline bool same_shape(const at::Tensor& a, const at::Tensor& b) {
  // There may be thousands of small tensors, so a call of memcmp for one or two dimensions would be noticeable.
  const auto x = a.sizes(), y = b.sizes();
  if (x.size() != y.size()) return false;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] != y[i]) return false;
  }
  return true;
}

// Whether the values of the tensor differ from those in its memory.
inline bool is_lazy(const at::Tensor& tensor) { return tensor.is_neg() || tensor._is_zerotensor(); }

inline at::Tensor resolved(const at::Tensor& lazy) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::empty(lazy.sizes(), lazy.options()).copy_(lazy);
}

inline bool has_type(const c10::TensorImpl& impl, bool may_be_half) {
  return impl.dtype() == caffe2::TypeMeta::Make<float>() ||
         (may_be_half && (impl.dtype() == caffe2::TypeMeta::Make<at::Half>() || impl.dtype() == caffe2::TypeMeta::Make<at::BFloat16>()));
}

// Whether a kernel can use its memory together with that of param.
inline bool is_usable(const at::Tensor& tensor, const at::Tensor& param) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.device() == param.device() && is_supported(impl.device()) && impl.layout() == at::kStrided && !tensor.is_nested() &&
         !impl.is_python_dispatch() && !is_lazy(tensor) && is_backed(tensor);
}

inline bool fits(const at::Tensor& tensor, const at::Tensor& param, bool may_be_half) {
  return is_usable(tensor, param) && has_type(*tensor.unsafeGetTensorImpl(), may_be_half) && same_shape(tensor, param);
}

inline bool are_codes(const at::Tensor& state, const at::Tensor& param) {
  return is_usable(state, param) && is_coded(state) && state.dim() == 1 && state.numel() == state_bytes(param.numel()) &&
         state.is_contiguous() && state.storage_offset() % static_cast<int64_t>(sizeof(float)) == 0;
}

// Whether its bytes can be eight more bits of each element of param.
inline bool extends(const at::Tensor& tensor, const at::Tensor& param) {
  return is_usable(tensor, param) && is_coded(tensor) && same_shape(tensor, param) &&
         param.unsafeGetTensorImpl()->dtype() == caffe2::TypeMeta::Make<at::BFloat16>();
}

// Whether it can be rounded stochastically, or need not be.
inline bool may_be_stochastic(const at::Tensor& param) {
  return param.unsafeGetTensorImpl()->dtype() != caffe2::TypeMeta::Make<at::Half>();
}

inline bool counts(const at::Tensor& step, const at::Tensor& param) {
  return step.layout() == at::kStrided && !step.is_nested() && !is_lazy(step) && step.scalar_type() == at::kFloat &&
         step.device() == param.device() && step.numel() == 1;
}

}  // namespace detail

// check_tensor throws unless the tensor can be used in the update of param. The error names the tensor, what was expected and what was
// given.
[[noreturn]] void refuse(const at::Tensor& tensor, const char* name, int64_t index, const at::Tensor& param, bool may_be_half);
inline void check_tensor(const at::Tensor& tensor, const char* name, int64_t index, const at::Tensor& param, bool may_be_half) {
  if (!detail::fits(tensor, param, may_be_half)) refuse(tensor, name, index, param, may_be_half);
}
// Throws unless the codes can be those of a state of param.
void check_codes(const at::Tensor& codes, const char* name, int64_t index, const at::Tensor& param);
// The same for bytes that extend param, in an optimizer that can use them.
void check_extension(const at::Tensor& more, const char* name, int64_t index, const at::Tensor& param, bool usable);
void check_stochastic(const at::Tensor& param, const char* name, int64_t index);
// The same for a number of the parameter, such as its step count.
void check_counter(const at::Tensor& counter, const std::string& name, int64_t index, const at::Tensor& param);
// Throws unless it is one number. It may have any type and device, because another optimizer may have saved it.
void check_foreign_counter(const at::Tensor& counter, const std::string& name, int64_t index);

// Throws unless all lists are as long as params. The error names the first one that is not.
void check_lengths(at::TensorList params, std::initializer_list<std::pair<const char*, at::TensorList>> lists);

}  // namespace dltrain::bindings
