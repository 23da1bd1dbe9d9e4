#include "bindings/execution_context.h"

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

ExecutionContext context_on(const c10::cuda::CUDAStream& stream) {
  return ExecutionContext::cuda(stream.device_index(), stream.stream(), &torch_allocator);
}

c10::cuda::CUDAStream stream_of(const ExecutionContext& context) {
  return c10::cuda::getStreamFromExternal(context.stream, static_cast<c10::DeviceIndex>(context.device));
}

}  // namespace

ExecutionContext cuda_context(const c10::Device& device) { return context_on(c10::cuda::getCurrentCUDAStream(device.index())); }

ExecutionContext cuda_side_context(const c10::Device& device) {
  return context_on(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index()));
}

std::shared_ptr<void> cuda_make_current(const ExecutionContext& context) {
  return std::make_shared<c10::cuda::CUDAStreamGuard>(stream_of(context));
}

void cuda_keep_for(const ExecutionContext& context, const at::Tensor& tensor) {
  c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), stream_of(context));
}

}  // namespace dltrain::bindings
