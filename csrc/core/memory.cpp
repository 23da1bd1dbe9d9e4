#include "core/memory.h"

#include <cstring>
#include <new>

#include "core/cache_line.h"
#include "core/cuda/runtime.h"

namespace dltrain {

namespace {

constexpr std::align_val_t alignment{cache_line};

}  // namespace

Memory::Memory(const ExecutionContext& context, int64_t bytes) : bytes_(bytes), context_(context) {
  if (bytes == 0) return;
  if (!context.on_cuda()) {
    data_ = ::operator new(static_cast<size_t>(bytes), alignment);
  } else if constexpr (built_with_cuda) {
    data_ = cuda::allocate(context, bytes);
  }
}

Memory Memory::pinned(int device, int64_t bytes) {
  Memory memory;
  if constexpr (built_with_cuda) {
    memory.data_ = cuda::allocate_pinned(device, bytes);
    memory.context_.device = device;
    memory.bytes_ = bytes;
    memory.pinned_ = true;
  } else {
    throw std::runtime_error("pinned memory: this build is without CUDA");
  }
  return memory;
}

Memory& Memory::operator=(Memory&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    context_ = other.context_;
    pinned_ = other.pinned_;
  }
  return *this;
}

void Memory::release() noexcept {
  if (!data_) return;
  if (pinned_ || context_.on_cuda()) {
    if constexpr (built_with_cuda) pinned_ ? cuda::release_pinned(context_.device, data_) : cuda::release(context_, data_);
  } else {
    ::operator delete(data_, alignment);
  }
  data_ = nullptr;
}

void copy(const ExecutionContext& context, void* to, const void* from, int64_t bytes) {
  if (bytes == 0) return;
  if (!context.on_cuda()) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  } else if constexpr (built_with_cuda) {
    cuda::copy(context, to, from, bytes);
  }
}

}  // namespace dltrain
