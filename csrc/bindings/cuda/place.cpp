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

Place place_on(const c10::cuda::CUDAStream& stream) { return Place::cuda(stream.device_index(), stream.stream(), &torch_allocator); }

c10::cuda::CUDAStream stream_of(const Place& place) {
  return c10::cuda::getStreamFromExternal(place.stream, static_cast<c10::DeviceIndex>(place.device));
}

}  // namespace

Place cuda_place(const c10::Device& device) { return place_on(c10::cuda::getCurrentCUDAStream(device.index())); }

Place cuda_side_place(const c10::Device& device) { return place_on(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())); }

std::shared_ptr<void> cuda_make_current(const Place& place) { return std::make_shared<c10::cuda::CUDAStreamGuard>(stream_of(place)); }

void cuda_keep_for(const Place& place, const at::Tensor& tensor) {
  c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), stream_of(place));
}

}  // namespace dltrain::bindings
