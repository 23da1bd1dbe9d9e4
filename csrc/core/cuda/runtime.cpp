#include "core/cuda/runtime.h"

#include <atomic>

#include "core/cuda/check.h"
#include "core/memory.h"

namespace dltrain::cuda {

namespace {

using HasContext = int (*)(int device, unsigned* flags, int* active);  // cuDevicePrimaryCtxGetState

HasContext find_has_context() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  constexpr auto name = "cuDevicePrimaryCtxGetState";
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 7000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  return error == cudaSuccess ? reinterpret_cast<HasContext>(found) : nullptr;
}

// Whether the device has a primary context; the query does not create one.
bool has_context(int device) {
  static const HasContext query = find_has_context();
  unsigned flags = 0;
  int active = 0;
  return !query || query(device, &flags, &active) != 0 || active != 0;
}

}  // namespace

DeviceGuard::DeviceGuard(int device) : device_(device), before_(device) {
  check(cudaGetDevice(&before_), "asking for the current device");
  if (device_ != before_) check(cudaSetDevice(device_), "changing the device");
}

DeviceGuard::DeviceGuard(int device, std::nothrow_t) noexcept : device_(device), before_(device) {
  cudaGetDevice(&before_);
  if (device_ != before_) cudaSetDevice(device_);
}

DeviceGuard::~DeviceGuard() {
  if (device_ != before_ && has_context(before_)) cudaSetDevice(before_);
}

void* allocate(const ExecutionContext& context, int64_t bytes) {
  if (context.allocator) return context.allocator->allocate(context.device, context.stream, bytes);
  const DeviceGuard guard(context.device);
  void* memory = nullptr;
  check(cudaMallocAsync(&memory, static_cast<size_t>(bytes), context.stream), "allocating device memory");
  return memory;
}

void release(const ExecutionContext& context, void* memory) noexcept {
  if (context.allocator) return context.allocator->release(memory, context.device, context.stream);
  const DeviceGuard guard(context.device, std::nothrow);
  cudaFreeAsync(memory, context.stream);
}

void* allocate_pinned(int device, int64_t bytes) {
  const DeviceGuard guard(device);
  void* memory = nullptr;
  if (bytes > 0) check(cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocDefault), "allocating pinned memory");
  return memory;
}

void release_pinned(int device, void* memory) noexcept {
  const DeviceGuard guard(device, std::nothrow);
  cudaFreeHost(memory);
}

void copy(const ExecutionContext& context, void* to, const void* from, int64_t bytes) {
  const DeviceGuard guard(context.device);
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, context.stream), "copying");
}

std::shared_ptr<CUevent_st> record_event(const ExecutionContext& context) {
  const DeviceGuard guard(context.device);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  const std::shared_ptr<CUevent_st> owned(event, [device = context.device](cudaEvent_t e) {
    const DeviceGuard own(device, std::nothrow);
    cudaEventDestroy(e);
  });
  check(cudaEventRecord(event, context.stream), "recording an event");
  return owned;
}

void wait_event(const ExecutionContext& context, CUevent_st* event) {
  const DeviceGuard guard(context.device);
  check(cudaStreamWaitEvent(context.stream, event, 0), "waiting for an event");
}

void synchronize_event(int device, CUevent_st* event) {
  const DeviceGuard guard(device);
  check(cudaEventSynchronize(event), "waiting for an event");
}

bool event_passed(int device, CUevent_st* event) {
  const DeviceGuard guard(device);
  const cudaError_t answer = cudaEventQuery(event);
  if (answer != cudaErrorNotReady) check(answer, "asking for an event");
  return answer == cudaSuccess;
}

bool is_capturing(const ExecutionContext& context) {
  const DeviceGuard guard(context.device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(context.stream, &status), "asking a stream whether it is captured");
  return status != cudaStreamCaptureStatusNone;
}

void stay_out_of_captures(int device) {
  const DeviceGuard guard(device);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "changing the capture mode of a thread");
}

Stream::Stream(int device) : device_(device) {
  const DeviceGuard guard(device);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
}

Stream::~Stream() {
  const DeviceGuard guard(device_, std::nothrow);
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

int multiprocessors(int device) {
  constexpr int most = 64;
  static std::atomic<int> known[most];  // the query takes longer than a launch
  int count = device < most ? known[device].load() : 0;
  if (count > 0) return count;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "counting multiprocessors");
  if (device < most) known[device] = count;
  return count;
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
