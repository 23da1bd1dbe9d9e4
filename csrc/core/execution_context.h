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

// Covers [0, n) with calls of body, possibly at the same time, each over at least `grain_size` indices (except the last call). A function
// pointer, by which modules without torch use torch's threads: so torch's own runtime resolves the OpenMP symbols.
using ParallelFor = void (*)(int64_t n, int64_t grain_size, const Range& body);

inline void serial_for(int64_t n, int64_t, const Range& body) {
  if (n > 0) body(0, n);
}

struct Allocator;

// Where work runs, and where the memory that it uses is. On the CPU it runs at once, on the threads of parallel_for. On a CUDA device calls
// only enqueue it, and it runs in the order of a stream.
struct ExecutionContext {
  ParallelFor parallel_for = serial_for;

  int device = -1;  // the CUDA device; -1 is the CPU
  CUstream_st* stream = nullptr;
  const Allocator* allocator = nullptr;  // null: CUDA's stream-ordered allocator

  static ExecutionContext cuda(int device, CUstream_st* stream, const Allocator* allocator = nullptr) {
    return {serial_for, device, stream, allocator};
  }
  bool on_cuda() const { return device >= 0; }
};

}  // namespace dltrain
