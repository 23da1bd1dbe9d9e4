#include "bindings/arguments.h"

#include <ATen/MemoryOverlap.h>

#include "bindings/execution_context.h"

namespace dltrain::bindings {

void check_plain(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
                       !tensor.is_neg() && !tensor.is_conj() && !tensor.is_quantized() && !tensor._is_zerotensor(),
                   name, ": expected a plain dense tensor, got layout ", tensor.layout(), " (", tensor.toString(), ")");
}

int64_t extent(const at::Tensor& tensor) {
  int64_t elements = tensor.numel() > 0;
  for (int64_t i = 0; i < tensor.dim() && elements > 0; ++i) elements += (tensor.size(i) - 1) * tensor.stride(i);
  return elements * static_cast<int64_t>(tensor.element_size());
}

void check_backed(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK_VALUE(is_backed(tensor), name, ": expected a tensor whose elements are all in memory, got one of shape ", tensor.sizes(),
                    " on a storage of ", tensor.has_storage() ? static_cast<int64_t>(tensor.storage().nbytes()) : 0, " bytes");
}

void check_written(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, name,
                    ": expected elements that each have a place of their own, got shape ", tensor.sizes(), " with strides ",
                    tensor.strides());
}

static void check_on(const Argument& argument, const at::Device& device) {
  const auto& [tensor, name, written] = argument;
  check_plain(tensor, name);
  TORCH_CHECK_VALUE(is_supported(tensor.device()), name, ": expected a tensor on ", supported_devices(), ", got one on ", tensor.device());
  TORCH_CHECK_VALUE(tensor.device() == device, name, ": expected a tensor on ", device, ", got one on ", tensor.device());
  check_backed(tensor, name);
}

static void check_type(const Argument& argument, bool fp16) {
  const at::ScalarType type = argument.tensor.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kBFloat16 || (fp16 && type == at::kHalf), argument.name, ": expected dtype float32",
                   fp16 ? ", float16" : "", " or bfloat16, got ", type);
}

void check_floats(const Argument& argument, const at::Device& device) {
  check_on(argument, device);
  check_type(argument, true);
}

void check_dense(const Argument& argument, const at::Device& device) {
  const auto& [tensor, name, written] = argument;
  check_on(argument, device);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, ": expected a contiguous tensor, got shape ", tensor.sizes(), " with strides ",
                    tensor.strides());
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % tensor.element_size() == 0, name,
                    ": expected elements that are aligned to their size, got address ", tensor.const_data_ptr());
}

TypedPointer elements_of(const Argument& argument, const at::Device& device, int64_t numel, bool fp16) {
  check_dense(argument, device);
  check_type(argument, fp16);
  TORCH_CHECK_VALUE(argument.tensor.numel() == numel, argument.name, ": expected ", numel, " elements, got ", argument.tensor.numel());
  return {argument.data(), dtype_of(argument.tensor)};
}

void check_feedback(const Codec& codec, bool stochastic, const std::string& expected) {
  TORCH_CHECK_VALUE(!stochastic || codec.stochastic_error.rms < 1.0, expected, " where the rounding is stochastic and the codec ",
                    codec.name, ", whose error can exceed what it encodes: feedback would make it grow");
}

void check_apart(const std::vector<Argument>& arguments) {
  const auto overlap = [](const at::Tensor& a, const at::Tensor& b) {
    const auto* const x = static_cast<const char*>(a.const_data_ptr());
    const auto* const y = static_cast<const char*>(b.const_data_ptr());
    return x < y + extent(b) && y < x + extent(a);
  };
  const auto same = [](const Argument& a, const Argument& b) {
    return !(a.written && b.written) && a.tensor.const_data_ptr() == b.tensor.const_data_ptr() &&
           a.tensor.scalar_type() == b.tensor.scalar_type();
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const Argument &a = arguments[i], &b = arguments[j];
      TORCH_CHECK_VALUE(!(a.written || b.written) || same(a, b) || !overlap(a.tensor, b.tensor), a.name,
                        ": expected memory apart from that of ", b.name, ", got some that both use");
    }
  }
}

void changed(const std::vector<Argument>& arguments) {
  for (const Argument& argument : arguments) {
    c10::TensorImpl* const impl = argument.tensor.unsafeGetTensorImpl();
    if (argument.written && !impl->is_inference()) impl->bump_version();
  }
}

}  // namespace dltrain::bindings
