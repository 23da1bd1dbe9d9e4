#pragma once

// The calls of the CUDA runtime that the rest of the code uses, without CUDA's headers. A build without CUDA never calls these functions.

#include <cstdint>
#include <memory>
#include <new>

#include "core/execution_context.h"

struct CUevent_st;

namespace dltrain::cuda {

void* allocate(const ExecutionContext& context, int64_t bytes);
void release(const ExecutionContext& context, void* memory) noexcept;
void* allocate_pinned(int device, int64_t bytes);
void release_pinned(int device, void* memory) noexcept;
void copy(const ExecutionContext& context, void* to, const void* from, int64_t bytes);

std::shared_ptr<CUevent_st> record_event(const ExecutionContext& context);
void wait_event(const ExecutionContext& context, CUevent_st* event);
void synchronize_event(int device, CUevent_st* event);
bool event_passed(int device, CUevent_st* event);

// Whether the context's stream is being captured, so that new work becomes part of a graph and runs when that is replayed.
bool is_capturing(const ExecutionContext& context);

// Allows the calling thread to query events of the device while another thread captures a graph.
void stay_out_of_captures(int device);

// Owns a stream.
class Stream {
 public:
  explicit Stream(int device);
  ~Stream();  // waits for the work on the stream
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  ExecutionContext context(const Allocator* allocator = nullptr) const { return ExecutionContext::cuda(device_, stream_, allocator); }

 private:
  int device_;
  CUstream_st* stream_ = nullptr;
};

// Makes a device the current device of the calling thread during the guard's lifetime. The destructor does not return to a device without a
// context: later calls of CUDA would create one there, which takes half a gigabyte of memory.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  DeviceGuard(int device, std::nothrow_t) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_, before_;
};

int device_count();
int multiprocessors(int device);

}  // namespace dltrain::cuda
