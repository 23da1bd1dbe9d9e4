#pragma once

// Two CUDA devices that are emulated by fibers, for machines without one: the CUDA sources of the project are compiled as C++ and run on
// them. As on a device, the work of a stream is done later, by a worker of its own, and only events order streams; fresh memory contains
// garbage. A thread of a block is a fiber, which the sanitizers treat as a thread, so they detect races and accesses out of bounds. Blocks
// run one after another. As with CUDA, each thread has a current device, at first 0; every call makes a context on it; and streams and
// events belong to a device. What a capture forbids fails: queries of its events, waits for work outside of it, streams that are not
// joined, and unsafe calls by any thread.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/queue.h"
#include "tests/emulated_cuda/grid.h"

#define CUDART_VERSION 13000
struct CUstream_st;

// A graph during capture and afterwards: the work of all its streams in the order of the calls, which is one of the orders that a device
// may use. Memory that is freed in it lives as long as the graph.
struct CUgraph_st {
  std::vector<std::function<void()>> work;
  std::vector<void*> freed;
  std::vector<CUstream_st*> streams;  // the first one began the capture
  ~CUgraph_st() {
    for (void* memory : freed) std::free(memory);
  }
};

struct CUstream_st {
  dltrain::Queue queue;
  int device = 0;
  std::atomic<CUgraph_st*> capture = nullptr;
  bool is_joined = true;  // during capture: whether its work is waited for

  void give(std::function<void()> work, bool is_work = true) {
    CUgraph_st* const its = capture;
    if (!its) return queue.submit(std::move(work));
    its->work.push_back(std::move(work));
    if (is_work) is_joined = false;
  }
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
  int device = 0;
  CUgraph_st* capture = nullptr;  // in which it was recorded last
  CUstream_st* stream = nullptr;  // on which it was recorded last
};
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = std::shared_ptr<CUgraph_st>*;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorInvalidConfiguration,
  cudaErrorNoDevice,
  cudaErrorInsufficientDriver,
  cudaErrorNotReady,
  cudaErrorStreamCaptureUnsupported,
  cudaErrorStreamCaptureIsolation,
  cudaErrorStreamCaptureUnjoined,
  cudaErrorCapturedEvent
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr unsigned long long cudaEnableDefault = 0;
enum cudaMemcpyKind { cudaMemcpyDefault };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed };
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocDefault = 0;

namespace emulated_cuda {

constexpr int devices = 2;
inline std::atomic<bool> has_context[devices];
inline std::atomic<int> launches = 0;  // of kernels
inline thread_local int current = 0;

// Makes a context on the current device; returns an error unless the arguments are right for the device.
inline cudaError_t on_current(bool is_right = true) {
  has_context[current] = true;
  return is_right ? cudaSuccess : cudaErrorInvalidValue;
}

inline CUstream_st& of(cudaStream_t stream) {
  static CUstream_st default_streams[devices];
  static const bool are_made = [] {
    for (int device = 0; device < devices; ++device) default_streams[device].device = device;
    return true;
  }();
  (void)are_made;
  return stream ? *stream : default_streams[current];
}
inline std::atomic<int> captures = 0;  // running captures, all in the global mode
inline thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

// For calls that could disturb a running capture.
inline cudaError_t unless_captured() {
  on_current();
  return captures > 0 && mode != cudaStreamCaptureModeRelaxed ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

inline cudaError_t on_device_of(cudaStream_t stream) { return on_current(of(stream).device == current); }

inline void* garbage(size_t bytes) {
  void* const memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return std::memset(memory, 0xA5, bytes);
}

// Grids of all streams run one at a time. Fibers stay on the thread that has started them.
inline dltrain::Queue device;

}  // namespace emulated_cuda

inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an emulated error"; }
inline const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaErrorEmulated"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = emulated_cuda::devices;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = emulated_cuda::current;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= emulated_cuda::devices) return cudaErrorInvalidValue;
  emulated_cuda::current = device;
  return emulated_cuda::on_current();
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult*) {
  if (std::strcmp(name, "cuDevicePrimaryCtxGetState") != 0) return cudaErrorInvalidValue;
  constexpr auto state = +[](int device, unsigned*, int* active) {
    *active = emulated_cuda::has_context[device];
    return 0;
  };
  *found = reinterpret_cast<void*>(state);
  return cudaSuccess;
}

inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = nullptr;
  if (const cudaError_t error = emulated_cuda::unless_captured(); error != cudaSuccess) return error;
  *memory = emulated_cuda::garbage(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return emulated_cuda::unless_captured();
}
inline cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t stream) {
  *memory = emulated_cuda::garbage(bytes);
  return emulated_cuda::on_device_of(stream);
}
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  CUstream_st& its = emulated_cuda::of(stream);
  CUgraph_st* const capture = its.capture;
  capture ? capture->freed.push_back(memory) : its.queue.submit([memory] { std::free(memory); });
  return emulated_cuda::on_device_of(stream);
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  emulated_cuda::of(stream).give([=] {
    const auto places = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
    if (bytes != sizeof(int) || places % sizeof(int) != 0) return void(std::memcpy(to, from, bytes));
    *static_cast<int*>(to) = __atomic_load_n(static_cast<const int*>(from), __ATOMIC_RELAXED);  // a device reads a word atomically
  });
  return emulated_cuda::on_device_of(stream);
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  (*stream)->device = emulated_cuda::current;
  return emulated_cuda::on_current();
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (emulated_cuda::of(stream).capture) return cudaErrorStreamCaptureUnsupported;
  emulated_cuda::of(stream).queue.run([] {});
  return emulated_cuda::on_device_of(stream);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t error = emulated_cuda::on_device_of(stream);
  delete stream;
  return error;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  (*event)->device = emulated_cuda::current;
  return emulated_cuda::on_current();
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return emulated_cuda::on_current();
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  CUstream_st& its = emulated_cuda::of(stream);
  if (event->device != its.device) return cudaErrorInvalidValue;
  const int record = ++event->state->recorded;
  const auto pass = [state = event->state, record] {
    const std::lock_guard lock(state->mutex);
    state->passed = record;
    state->changed.notify_all();
  };
  its.give(pass, false);
  event->capture = its.capture;
  event->stream = &its;
  return emulated_cuda::on_current();
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  CUstream_st& its = emulated_cuda::of(stream);
  if (its.capture && event->capture != its.capture) return cudaErrorStreamCaptureIsolation;
  if (event->capture) {
    if (!its.capture) event->capture->streams.push_back(&its);
    its.capture = event->capture;
    event->stream->is_joined = true;
  }
  its.give([state = event->state, record = event->state->recorded] { state->wait_for(record); });
  return emulated_cuda::on_current();
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->capture) return cudaErrorCapturedEvent;
  event->state->wait_for(event->state->recorded);
  return emulated_cuda::unless_captured();
}

inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event->capture) return cudaErrorCapturedEvent;
  if (const cudaError_t error = emulated_cuda::unless_captured(); error != cudaSuccess) return error;
  return event->state->has_passed(event->state->recorded) ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = emulated_cuda::of(stream).capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return emulated_cuda::on_current();
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, emulated_cuda::mode);
  return emulated_cuda::on_current();
}

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  CUstream_st& its = emulated_cuda::of(stream);
  if (its.capture) return cudaErrorInvalidValue;
  its.capture = new CUgraph_st{{}, {}, {&its}};
  ++emulated_cuda::captures;
  return emulated_cuda::on_device_of(stream);
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  CUgraph_st* const captured = emulated_cuda::of(stream).capture;
  if (!captured || captured->streams.front() != &emulated_cuda::of(stream)) return cudaErrorInvalidValue;
  --emulated_cuda::captures;
  cudaError_t error = emulated_cuda::on_device_of(stream);
  for (CUstream_st* const each : captured->streams) {
    if (each != captured->streams.front() && !each->is_joined) error = cudaErrorStreamCaptureUnjoined;
    each->capture = nullptr;
    each->is_joined = true;
  }
  *graph = error == cudaSuccess ? captured : nullptr;
  if (!*graph) delete captured;
  return error;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new std::shared_ptr<CUgraph_st>(graph);  // it owns the graph
  return emulated_cuda::on_current();
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  emulated_cuda::of(stream).queue.submit([graph = *executable] {
    for (const auto& work : graph->work) work();
  });
  return emulated_cuda::on_device_of(stream);
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return emulated_cuda::on_current();
}

template <class Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters), dim3 grid, dim3 threads, void** arguments, size_t, cudaStream_t stream) {
  if (grid.x == 0 || threads.x == 0 || threads.x > 1024 || sizeof(Parameters) > 32764) return cudaErrorInvalidConfiguration;
  ++emulated_cuda::launches;
  const auto parameters = std::make_shared<Parameters>(*static_cast<const Parameters*>(arguments[0]));
  emulated_cuda::of(stream).give([=] {
    const auto done = std::make_shared<std::promise<void>>();
    emulated_cuda::device.submit([=] {
      emulated_cuda::run_grid(kernel, grid, threads.x, *parameters);
      done->set_value();
    });
    done->get_future().wait();
  });
  return emulated_cuda::on_device_of(stream);
}
