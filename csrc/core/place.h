#pragma once

#include <cstdint>
#include <functional>

namespace dltrain {

using Range = std::function<void(int64_t begin, int64_t end)>;

// Covers [0, n) with calls of body, each over at least `grain` indices (but for the last), possibly at the same time.
using ParallelFor = void (*)(int64_t n, int64_t grain, const Range& body);

inline void serial_for(int64_t n, int64_t, const Range& body) {
  if (n > 0) body(0, n);
}

// Where a kernel runs: on the CPU, with the threads that parallel_for brings.
struct Place {
  ParallelFor parallel_for = serial_for;
};

}  // namespace dltrain
