#pragma once

// A CUDA device made of threads, for machines without one: the project's own CUDA sources run on it, compiled as C++. As on a device, a
// stream's work is done later, by a worker of its own, and only events order streams; fresh memory holds garbage. A thread of a block is a
// thread, so that the sanitizers see races and accesses out of bounds. Blocks run one after another, and nothing is fast.

#include <barrier>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "core/queue.h"

#define CUDART_VERSION 13000
#define __global__
#define __device__
#define __host__
#define __shared__ static  // blocks run one after another
#define __grid_constant__
#define __launch_bounds__(...)
#define __syncthreads() emulated_cuda::block->arrive_and_wait()
#define __shfl_xor_sync(mask, value, apart) emulated_cuda::exchange(value, apart)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline thread_local dim3 threadIdx, blockIdx, gridDim;

struct CUstream_st {
  dltrain::Queue queue;
};
struct CUevent_st {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int recorded = 0, passed = 0;

    void wait_for(int record) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return passed >= record; });
    }
    bool has_passed(int record) {
      const std::lock_guard lock(mutex);
      return passed >= record;
    }
  };
  std::shared_ptr<State> state = std::make_shared<State>();  // streams may outlive the event
};
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorInvalidConfiguration,
  cudaErrorNoDevice,
  cudaErrorInsufficientDriver,
  cudaErrorNotReady
};
enum cudaMemcpyKind { cudaMemcpyDefault };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocDefault = 0;

namespace emulated_cuda {

inline std::mutex one_grid_at_a_time;
inline std::barrier<>* block = nullptr;

// A warp of threads: what one hands in, another takes.
constexpr unsigned warp_size = 32;
struct Warp {
  std::barrier<> barrier{warp_size};
  uint64_t slots[warp_size];
};
inline thread_local Warp* warp = nullptr;

template <class T>
T exchange(T value, unsigned apart) {
  const unsigned lane = threadIdx.x % warp_size;
  std::memcpy(&warp->slots[lane], &value, sizeof(T));
  warp->barrier.arrive_and_wait();
  std::memcpy(&value, &warp->slots[lane ^ apart], sizeof(T));
  warp->barrier.arrive_and_wait();
  return value;
}

inline CUstream_st& of(cudaStream_t stream) {
  static CUstream_st default_stream;
  return stream ? *stream : default_stream;
}

template <class Parameters>
void run_grid(void (*kernel)(Parameters), dim3 grid, unsigned threads, const Parameters& parameters) {
  const std::lock_guard lock(one_grid_at_a_time);
  std::optional<std::barrier<>> in_block;
  const auto next_block = [&]() noexcept { block = &in_block.emplace(threads); };
  std::barrier between_blocks(threads, next_block);
  std::deque<Warp> warps(threads / warp_size);
  std::vector<std::thread> team;
  for (unsigned thread = 0; thread < threads; ++thread) {
    team.emplace_back([&, thread] {
      threadIdx = {thread};
      warp = &warps[thread / warp_size];
      gridDim = grid;
      for (unsigned index = 0; index < grid.x; ++index) {
        between_blocks.arrive_and_wait();
        blockIdx = {index};
        kernel(parameters);
        block->arrive_and_drop();  // the others do not wait for a thread that has returned
      }
    });
  }
  for (auto& thread : team) thread.join();
}

}  // namespace emulated_cuda

inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an emulated error"; }
inline const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaErrorEmulated"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }

inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*memory, 0xA5, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) { return cudaHostAlloc(memory, bytes, cudaHostAllocDefault); }
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  emulated_cuda::of(stream).queue.submit([memory] { std::free(memory); });
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  emulated_cuda::of(stream).queue.submit([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  emulated_cuda::of(stream).queue.run([] {});
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const int record = ++event->state->recorded;
  emulated_cuda::of(stream).queue.submit([state = event->state, record] {
    const std::lock_guard lock(state->mutex);
    state->passed = record;
    state->changed.notify_all();
  });
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  emulated_cuda::of(stream).queue.submit([state = event->state, record = event->state->recorded] { state->wait_for(record); });
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  event->state->wait_for(event->state->recorded);
  return cudaSuccess;
}

inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->state->has_passed(event->state->recorded) ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

template <class Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters), dim3 grid, dim3 threads, void** arguments, size_t, cudaStream_t stream) {
  if (grid.x == 0 || threads.x == 0 || threads.x > 1024 || sizeof(Parameters) > 32764) return cudaErrorInvalidConfiguration;
  const auto parameters = std::make_shared<Parameters>(*static_cast<const Parameters*>(arguments[0]));
  emulated_cuda::of(stream).queue.submit([=] { emulated_cuda::run_grid(kernel, grid, threads.x, *parameters); });
  return cudaSuccess;
}
