#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/cuda/runtime.h"
#include "core/event.h"
#include "core/memory.h"

namespace dltrain {

inline ExecutionContext cpu_context() { return {}; }
// The last device, which is never current by default, so that test_emulated_cuda.cpp detects code that does not set the device.
inline ExecutionContext cuda_context() {
  if constexpr (built_with_cuda) return ExecutionContext::cuda(cuda::device_count() - 1, nullptr);
  return {};
}

inline bool has_cuda_device() {
  if constexpr (built_with_cuda) return cuda::device_count() > 0;
  return false;
}

// An emulated device is slow.
inline bool is_slow([[maybe_unused]] const ExecutionContext& context) {
#ifdef DLTRAIN_EMULATED
  return context.on_cuda();
#else
  return false;
#endif
}

// Base of suites that run on every kind of execution context of the build; those on CUDA are skipped without a device.
class OnEveryContext : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "cuda" && !has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  }
  ExecutionContext context() const { return GetParam() == "cuda" ? cuda_context() : cpu_context(); }
};

inline std::vector<std::string> kinds_of_contexts() {
  return built_with_cuda ? std::vector<std::string>{"cpu", "cuda"} : std::vector<std::string>{"cpu"};
}

#define DLT_ON_EVERY_CONTEXT(Suite) \
  INSTANTIATE_TEST_SUITE_P(Contexts, Suite, testing::ValuesIn(kinds_of_contexts()), [](const auto& info) { return info.param; })

// An array on an execution context. `offset` elements precede it, so that it need not be aligned.
template <class T>
class Array {
 public:
  Array(const ExecutionContext& context, const std::vector<T>& values, int64_t offset = 0)
      : context_(context), size_(static_cast<int64_t>(values.size())), offset_(offset), memory_(context, (size_ + offset) * bytes(1)) {
    copy(context_, data(), values.data(), bytes(size_));
    Event::record(context_).synchronize();
  }
  ~Array() { Event::record(context_).synchronize(); }

  T* data() const { return static_cast<T*>(memory_.data()) + offset_; }

  std::vector<T> values() const {
    std::vector<T> out(size_);
    copy(context_, out.data(), data(), bytes(size_));
    Event::record(context_).synchronize();
    return out;
  }

 private:
  static int64_t bytes(int64_t elements) { return elements * static_cast<int64_t>(sizeof(T)); }

  ExecutionContext context_;
  int64_t size_, offset_;
  Memory memory_;
};

}  // namespace dltrain
