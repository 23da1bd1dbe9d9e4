#include "core/cuda/stream_queue.h"

#include "core/cuda/check.h"
#include "core/cuda/runtime.h"

namespace dltrain::cuda {

StreamQueue::StreamQueue(int device, const Allocator* allocator) {
  const DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  place_ = Place::cuda(device, stream, allocator);
}

StreamQueue::~StreamQueue() {
  cudaStreamSynchronize(place_.stream);
  cudaStreamDestroy(place_.stream);
}

Event StreamQueue::submit(const Place& caller, const Task& task) {
  const std::lock_guard lock(mutex_);
  Event::record(caller).wait(place_);
  try {
    task(place_);
  } catch (...) {
    Event::record(place_).wait(caller);  // what it enqueued before may still be under way
    throw;
  }
  return Event::record(place_);
}

}  // namespace dltrain::cuda
