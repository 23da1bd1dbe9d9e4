#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <memory>
#include <optional>

#include "core/execution_context.h"

namespace dltrain::bindings {

inline bool is_supported(const c10::Device& device) { return device.is_cpu() || (built_with_cuda && device.is_cuda()); }
inline const char* supported_devices() { return built_with_cuda ? "the CPU or a CUDA device" : "the CPU"; }

// Where the caller's work on tensors of a device runs: the calling thread and torch's threads, or the device's current stream with memory
// from torch's allocator.
ExecutionContext caller_context(const c10::Device& device);

// Makes a device torch's current one during the guard's lifetime. It does nothing for the CPU.
inline c10::OptionalDeviceGuard on_device(const c10::Device& device) {
  return c10::OptionalDeviceGuard(device.is_cpu() ? std::nullopt : std::make_optional(device));
}

// Makes a context's stream torch's current one during the object's lifetime.
class OnStream {
 public:
  explicit OnStream(const ExecutionContext& context);

 private:
  std::shared_ptr<void> guard_;
};

// For CUDA devices; implemented in bindings/cuda/.
ExecutionContext cuda_context(const c10::Device& device);
ExecutionContext cuda_side_context(const c10::Device& device);  // a stream that callers do not use
std::shared_ptr<void> cuda_make_current(const ExecutionContext& context);
// Torch's allocator does not reuse the tensor's memory before the work that the context has been given so far is done.
void cuda_keep_for(const ExecutionContext& context, const at::Tensor& tensor);

}  // namespace dltrain::bindings
