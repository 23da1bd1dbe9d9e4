#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "kernels/codec.h"

// Tensors and numbers as arguments: checked, so that bad input gets an error that names the argument, what was expected and what came.
namespace dltrain::bindings {

// Of float32, float16 or bfloat16.
inline Dtype dtype_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf ? Dtype::fp16 : tensor.scalar_type() == at::kBFloat16 ? Dtype::bf16 : Dtype::fp32;
}

// A tensor argument: its name in errors, and whether it is written.
struct Argument {
  const at::Tensor& tensor;
  std::string name;
  bool written = false;

  // Memory that shares with nobody where it is written.
  void* data() const { return written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr()); }
};

// Its elements are numbers in memory: not sparse, nor what only stands for a tensor.
void check_plain(const at::Tensor& tensor, const std::string& name);

// The bytes from its first element to behind its last one, also where there are gaps.
int64_t extent(const at::Tensor& tensor);

// Who frees or shrinks a storage by hand leaves tensors whose elements are not all there.
inline bool is_backed(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (impl.numel() == 0) return true;
  if (!impl.has_storage()) return false;
  const auto size = static_cast<int64_t>(impl.itemsize());
  const int64_t bytes = impl.is_contiguous() ? impl.numel() * size : extent(tensor);
  return impl.storage_offset() * size + bytes <= static_cast<int64_t>(impl.unsafe_storage().unsafeGetStorageImpl()->nbytes());
}
void check_backed(const at::Tensor& tensor, const std::string& name);

// Its elements each have a place of their own.
void check_written(const at::Tensor& tensor, const std::string& name);

// On the device, of whatever strides, and of float32, float16 or bfloat16.
void check_floats(const Argument& argument, const at::Device& device);

void check_dense(const Argument& argument, const at::Device& device);

// Of `numel` elements; fp16 or not.
TypedPointer elements_of(const Argument& argument, const at::Device& device, int64_t numel, bool fp16 = true);

template <class T>
T* number_of(const Argument& argument, const at::Device& device) {
  check_dense(argument, device);
  constexpr auto type = c10::CppTypeToScalarType<T>::value;
  TORCH_CHECK_TYPE(argument.tensor.scalar_type() == type && argument.tensor.numel() == 1, argument.name, ": expected one ", type,
                   " number, got ", argument.tensor.toString(), " of shape ", argument.tensor.sizes());
  return static_cast<T*>(argument.data());
}

// What encoding loses can be fed back only if it shrinks. `expected`: the argument, and what it should have been.
void check_feedback(const Codec& codec, bool stochastic, const std::string& expected = "residual: expected none");

// Parts are worked on in any order, so what one writes no other may read or write: but for the same elements, in the same places.
void check_apart(const std::vector<Argument>& arguments);

// Tells autograd that those which are written have changed.
void changed(const std::vector<Argument>& arguments);

}  // namespace dltrain::bindings
