#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/cuda/runtime.h"
#include "core/event.h"
#include "core/memory.h"

namespace dltrain {

inline Place cpu_place() { return {}; }
// The last device, which no thread has as its current one by itself: test_emulated_cuda.cpp sees who forgets that.
inline Place cuda_place() {
  if constexpr (built_with_cuda) return Place::cuda(cuda::device_count() - 1, nullptr);
  return {};
}

// An emulated device takes its time.
inline bool is_slow([[maybe_unused]] const Place& place) {
#ifdef DLTRAIN_EMULATED
  return place.on_cuda();
#else
  return false;
#endif
}

// Tests of a suite that derives from this run on every kind of place that the build has; those on CUDA are skipped without a device.
class OnEveryPlace : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if constexpr (built_with_cuda) {
      if (GetParam() == "cuda" && cuda::device_count() == 0) GTEST_SKIP() << "no CUDA device";
    }
  }
  Place place() const { return GetParam() == "cuda" ? cuda_place() : cpu_place(); }
};

inline std::vector<std::string> kinds_of_places() {
  return built_with_cuda ? std::vector<std::string>{"cpu", "cuda"} : std::vector<std::string>{"cpu"};
}

#define DLT_ON_EVERY_PLACE(Suite) \
  INSTANTIATE_TEST_SUITE_P(Places, Suite, testing::ValuesIn(kinds_of_places()), [](const auto& info) { return info.param; })

// Numbers at a place. `offset` elements lie before them, so that they need not be aligned.
template <class T>
class Array {
 public:
  Array(const Place& place, const std::vector<T>& values, int64_t offset = 0)
      : place_(place), size_(static_cast<int64_t>(values.size())), offset_(offset), memory_(place, (size_ + offset) * bytes(1)) {
    copy(place_, data(), values.data(), bytes(size_));
    Event::record(place_).synchronize();
  }
  ~Array() { Event::record(place_).synchronize(); }

  T* data() const { return static_cast<T*>(memory_.data()) + offset_; }

  std::vector<T> values() const {
    std::vector<T> out(size_);
    copy(place_, out.data(), data(), bytes(size_));
    Event::record(place_).synchronize();
    return out;
  }

 private:
  static int64_t bytes(int64_t elements) { return elements * static_cast<int64_t>(sizeof(T)); }

  Place place_;
  int64_t size_, offset_;
  Memory memory_;
};

}  // namespace dltrain
