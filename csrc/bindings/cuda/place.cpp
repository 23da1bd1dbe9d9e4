#include "bindings/place.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "core/memory.h"

namespace dltrain::bindings {

namespace {

const Allocator torch_allocator = {
    [](int device, CUstream_st* stream, int64_t bytes) {
      const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
      return c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(static_cast<size_t>(bytes), stream);
    },
    [](void* memory, int, CUstream_st*) { c10::cuda::CUDACachingAllocator::raw_delete(memory); },
};

}  // namespace

Place cuda_place(const c10::Device& device) {
  return Place::cuda(device.index(), c10::cuda::getCurrentCUDAStream(device.index()).stream(), &torch_allocator);
}

}  // namespace dltrain::bindings
