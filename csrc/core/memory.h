#pragma once

#include <cstdint>
#include <utility>

#include "core/check.h"
#include "core/execution_context.h"

namespace dltrain {

// A stream-ordered allocator of device memory: released memory may be used again by work that is enqueued later on the same stream.
struct Allocator {
  void* (*allocate)(int device, CUstream_st* stream, int64_t bytes);
  void (*release)(void* memory, int device, CUstream_st* stream);
};

// Owns a block of memory of a context, aligned to a cache line. On CUDA it is allocated and freed in the order of the context's stream.
class Memory {
 public:
  Memory() = default;
  Memory(const ExecutionContext& context, int64_t bytes);
  static Memory pinned(int device, int64_t bytes);  // page-locked host memory
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept;
  ~Memory() { release(); }

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  bool belongs_to(const ExecutionContext& context) const { return context_.device == context.device && context_.stream == context.stream; }

  // From now on another stream uses the memory, and frees it. Not for memory of an allocator, which has one stream per block.
  void hand_to(const ExecutionContext& context) {
    check(!context_.allocator, "hand_to: expected memory without an allocator of its own");
    context_ = context;
    context_.allocator = nullptr;
  }

 private:
  void release() noexcept;

  void* data_ = nullptr;
  int64_t bytes_ = 0;
  ExecutionContext context_;
  bool pinned_ = false;
};

// Memory that only grows. Its contents are lost when it grows.
class Buffer {
 public:
  void* reserve(const ExecutionContext& context, int64_t bytes) {
    if (bytes > memory_.bytes() || !memory_.belongs_to(context)) {
      memory_ = Memory();
      memory_ = Memory(context, bytes);
    }
    return memory_.data();
  }
  int64_t bytes() const { return memory_.bytes(); }

 private:
  Memory memory_;
};

// Copies within the memory of the context, or between it and host memory.
void copy(const ExecutionContext& context, void* to, const void* from, int64_t bytes);

}  // namespace dltrain
