#pragma once

// What the rest of core asks of the CUDA runtime, without its headers. A build without CUDA declares these and never calls them.

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

// Whether what the place is given now becomes part of a graph, to run when that is replayed.
bool is_capturing(const ExecutionContext& context);

// Lets the calling thread ask for events of the device while another one captures.
void stay_out_of_captures(int device);

// A stream of one's own.
class Stream {
 public:
  explicit Stream(int device);
  ~Stream();  // returns when the work given is done
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  ExecutionContext context(const Allocator* allocator = nullptr) const { return ExecutionContext::cuda(device_, stream_, allocator); }

 private:
  int device_;
  CUstream_st* stream_ = nullptr;
};

// Makes a device the calling thread's current one for as long as this lives: whatever is asked of CUDA makes a context on the device that
// is current, half a gigabyte of it. So a device that had none is not gone back to.
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
