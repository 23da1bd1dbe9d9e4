#include "core/memory.h"

#include <cstring>
#include <new>

#include "core/cache_line.h"
#include "core/cuda/runtime.h"

namespace dltrain {

namespace {

constexpr std::align_val_t alignment{cache_line};

}  // namespace

Memory::Memory(const Place& place, int64_t bytes) : bytes_(bytes), place_(place) {
  if (bytes == 0) return;
  if (!place.on_cuda()) {
    data_ = ::operator new(static_cast<size_t>(bytes), alignment);
  } else if constexpr (built_with_cuda) {
    data_ = cuda::allocate(place, bytes);
  }
}

Memory Memory::pinned(int device, int64_t bytes) {
  Memory memory;
  if constexpr (built_with_cuda) {
    memory.data_ = cuda::allocate_pinned(device, bytes);
    memory.place_.device = device;
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
    place_ = other.place_;
    pinned_ = other.pinned_;
  }
  return *this;
}

void Memory::release() noexcept {
  if (!data_) return;
  if (pinned_ || place_.on_cuda()) {
    if constexpr (built_with_cuda) pinned_ ? cuda::release_pinned(place_.device, data_) : cuda::release(place_, data_);
  } else {
    ::operator delete(data_, alignment);
  }
  data_ = nullptr;
}

void copy(const Place& place, void* to, const void* from, int64_t bytes) {
  if (bytes == 0) return;
  if (!place.on_cuda()) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  } else if constexpr (built_with_cuda) {
    cuda::copy(place, to, from, bytes);
  }
}

}  // namespace dltrain
