#pragma once

#include <c10/core/Device.h>

#include "core/place.h"

namespace dltrain::bindings {

inline bool is_supported(const c10::Device& device) { return device.is_cpu() || (built_with_cuda && device.is_cuda()); }
inline const char* supported_devices() { return built_with_cuda ? "the CPU or a CUDA device" : "the CPU"; }

// Where the caller's work on tensors of a device goes: the calling thread with torch's threads beside it, or the device's current stream,
// with memory from torch's allocator.
Place caller_place(const c10::Device& device);

// Of a CUDA device; in bindings/cuda/.
Place cuda_place(const c10::Device& device);

}  // namespace dltrain::bindings
