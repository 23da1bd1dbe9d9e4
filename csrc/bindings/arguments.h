#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "kernels/codec.h"

// Checks of tensors and numbers that are arguments. An error names the argument, what was expected and what was given.
namespace dltrain::bindings {

// The element type of a tensor of float32, float16 or bfloat16.
inline Dtype dtype_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf ? Dtype::fp16 : tensor.scalar_type() == at::kBFloat16 ? Dtype::bf16 : Dtype::fp32;
}

// A tensor argument: its name in errors, and whether it is written.
struct Argument {
  const at::Tensor& tensor;
  std::string name;
  bool written = false;

  // The pointer to the elements. For a written tensor it first materializes a lazy copy of the memory (copy-on-write).
  void* data() const { return written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr()); }
};

// Throws unless the tensor's elements are plain numbers in memory: it is not sparse, nested, quantized or a Python subclass with dispatch.
void check_plain(const at::Tensor& tensor, const std::string& name);

// The number of bytes from the first element to the end of the last one, including gaps.
int64_t extent(const at::Tensor& tensor);

// Whether all elements are in the storage. They are not if a user has freed or shrunk it.
inline bool is_backed(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (impl.numel() == 0) return true;
  if (!impl.has_storage()) return false;
  const auto size = static_cast<int64_t>(impl.itemsize());
  const int64_t bytes = impl.is_contiguous() ? impl.numel() * size : extent(tensor);
  return impl.storage_offset() * size + bytes <= static_cast<int64_t>(impl.unsafe_storage().unsafeGetStorageImpl()->nbytes());
}
void check_backed(const at::Tensor& tensor, const std::string& name);

// Throws if two elements of the tensor share memory.
void check_written(const at::Tensor& tensor, const std::string& name);

// Throws unless the tensor is on the device and has dtype float32, float16 or bfloat16. Its strides may be any.
void check_floats(const Argument& argument, const at::Device& device);

void check_dense(const Argument& argument, const at::Device& device);

// The pointer to a dense tensor of `numel` elements. fp16: whether float16 is accepted.
TypedPointer elements_of(const Argument& argument, const at::Device& device, int64_t numel, bool fp16 = true);

template <class T>
T* number_of(const Argument& argument, const at::Device& device) {
  check_dense(argument, device);
  constexpr auto type = c10::CppTypeToScalarType<T>::value;
  TORCH_CHECK_TYPE(argument.tensor.scalar_type() == type && argument.tensor.numel() == 1, argument.name, ": expected one ", type,
                   " number, got ", argument.tensor.toString(), " of shape ", argument.tensor.sizes());
  return static_cast<T*>(argument.data());
}

// Throws unless error feedback converges for this codec and rounding. `expected`: the argument and what is expected, for the error.
void check_feedback(const Codec& codec, bool stochastic, const std::string& expected = "residual: expected none");

// Throws if a written tensor shares memory with another one, because elements are processed in any order. Two tensors may be the same
// memory and type if only one of them is written.
void check_apart(const std::vector<Argument>& arguments);

// Increments the version of each written tensor, so that autograd notices the change.
void changed(const std::vector<Argument>& arguments);

}  // namespace dltrain::bindings
