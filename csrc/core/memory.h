#pragma once

#include <cstdint>
#include <utility>

#include "core/check.h"
#include "core/execution_context.h"

namespace dltrain {

// Device memory in the order of a stream: what is released may be handed out again for work that comes later in it.
struct Allocator {
  void* (*allocate)(int device, CUstream_st* stream, int64_t bytes);
  void (*release)(void* memory, int device, CUstream_st* stream);
};

// A block of memory at a place, on a cache-line border. On CUDA it comes and goes in the order of the context's stream.
class Memory {
 public:
  Memory() = default;
  Memory(const ExecutionContext& context, int64_t bytes);
  static Memory pinned(int device, int64_t bytes);  // on the host; the device copies to and from it without the processor
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept;
  ~Memory() { release(); }

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  bool lies_at(const ExecutionContext& context) const { return context_.device == context.device && context_.stream == context.stream; }

  // Another stream uses it last, and is the one to give it back. Not for memory of an allocator: those know one stream a block.
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

// Memory that only ever grows; growing forgets what it held.
class Buffer {
 public:
  void* reserve(const ExecutionContext& context, int64_t bytes) {
    if (bytes > memory_.bytes() || !memory_.lies_at(context)) {
      memory_ = Memory();
      memory_ = Memory(context, bytes);
    }
    return memory_.data();
  }

 private:
  Memory memory_;
};

// Within the memory of the place, or between it and the host's.
void copy(const ExecutionContext& context, void* to, const void* from, int64_t bytes);

}  // namespace dltrain
