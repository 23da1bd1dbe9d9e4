#pragma once

#include <cstdint>
#include <functional>

struct CUstream_st;

namespace dltrain {

#ifdef DLTRAIN_CUDA
inline constexpr bool built_with_cuda = true;
#else
inline constexpr bool built_with_cuda = false;
#endif

using Range = std::function<void(int64_t begin, int64_t end)>;

// Covers [0, n) with calls of body, each over at least `grain` indices (but for the last), possibly at the same time.
using ParallelFor = void (*)(int64_t n, int64_t grain, const Range& body);

inline void serial_for(int64_t n, int64_t, const Range& body) {
  if (n > 0) body(0, n);
}

struct Allocator;

// Where work is done, and where the memory that it touches lies. On the CPU: at once, with the threads that parallel_for brings. On a CUDA
// device: in the order of a stream; calls only enqueue.
struct ExecutionContext {
  ParallelFor parallel_for = serial_for;

  int device = -1;  // of CUDA; -1: the CPU
  CUstream_st* stream = nullptr;
  const Allocator* allocator = nullptr;  // CUDA's stream-ordered one where null

  static ExecutionContext cuda(int device, CUstream_st* stream, const Allocator* allocator = nullptr) {
    return {serial_for, device, stream, allocator};
  }
  bool on_cuda() const { return device >= 0; }
};

}  // namespace dltrain
