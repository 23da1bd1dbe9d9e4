#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace dltrain {

// Scratch memory on a cache-line border that only ever grows; growing forgets what it held.
class Buffer {
 public:
  void* reserve(int64_t bytes) {
    if (bytes > capacity_) {
      memory_.reset();
      capacity_ = 0;
      memory_.reset(::operator new(static_cast<size_t>(bytes), alignment));
      capacity_ = bytes;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, alignment); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t capacity_ = 0;
};

}  // namespace dltrain
