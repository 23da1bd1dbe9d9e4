#include "core/cuda/runtime.h"

#include "core/cuda/check.h"
#include "core/memory.h"

namespace dltrain::cuda {

DeviceGuard::DeviceGuard(int device) : device_(device) {
  check(cudaGetDevice(&before_), "asking for the current device");
  if (device_ != before_) check(cudaSetDevice(device_), "changing the device");
}

DeviceGuard::~DeviceGuard() {
  if (device_ != before_) cudaSetDevice(before_);
}

void* allocate(const Place& place, int64_t bytes) {
  if (place.allocator) return place.allocator->allocate(place.device, place.stream, bytes);
  const DeviceGuard guard(place.device);
  void* memory = nullptr;
  check(cudaMallocAsync(&memory, static_cast<size_t>(bytes), place.stream), "allocating device memory");
  return memory;
}

void release(const Place& place, void* memory) noexcept {
  if (place.allocator) return place.allocator->release(memory, place.device, place.stream);
  int before = place.device;  // no guard, which throws
  cudaGetDevice(&before);
  if (before != place.device) cudaSetDevice(place.device);
  cudaFreeAsync(memory, place.stream);
  if (before != place.device) cudaSetDevice(before);
}

void* allocate_pinned(int64_t bytes) {
  void* memory = nullptr;
  if (bytes > 0) check(cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocDefault), "allocating pinned memory");
  return memory;
}

void release_pinned(void* memory) noexcept { cudaFreeHost(memory); }

void copy(const Place& place, void* to, const void* from, int64_t bytes) {
  const DeviceGuard guard(place.device);
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, place.stream), "copying");
}

std::shared_ptr<CUevent_st> record_event(const Place& place) {
  const DeviceGuard guard(place.device);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  const std::shared_ptr<CUevent_st> owned(event, [](cudaEvent_t e) { cudaEventDestroy(e); });
  check(cudaEventRecord(event, place.stream), "recording an event");
  return owned;
}

void wait_event(const Place& place, CUevent_st* event) {
  const DeviceGuard guard(place.device);
  check(cudaStreamWaitEvent(place.stream, event, 0), "waiting for an event");
}

void synchronize_event(CUevent_st* event) { check(cudaEventSynchronize(event), "waiting for an event"); }

bool event_passed(CUevent_st* event) {
  const cudaError_t answer = cudaEventQuery(event);
  if (answer != cudaErrorNotReady) check(answer, "asking for an event");
  return answer == cudaSuccess;
}

bool is_capturing(const Place& place) {
  const DeviceGuard guard(place.device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(place.stream, &status), "asking a stream whether it is captured");
  return status != cudaStreamCaptureStatusNone;
}

void stay_out_of_captures() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "changing the capture mode of a thread");
}

Stream::Stream(int device) : device_(device) {
  const DeviceGuard guard(device);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
}

Stream::~Stream() {
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

int device_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    return 0;
  }
  check(error, "counting devices");
  return count;
}

}  // namespace dltrain::cuda
