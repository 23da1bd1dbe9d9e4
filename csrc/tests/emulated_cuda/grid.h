#pragma once

// Defines what the CUDA sources use in kernels, and how the emulated device runs one: a thread of a block is a fiber, and blocks run one
// after another.

#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/emulated_cuda/fibers.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static  // blocks run one after another
#define __grid_constant__
#define __launch_bounds__(...)
#define __syncthreads() emulated_cuda::block->barrier.arrive_and_wait()
#define __shfl_xor_sync(mask, value, apart) emulated_cuda::exchange(value, apart)
#define threadIdx (dim3{emulated_cuda::Fibers::index()})

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
#define __builtin_assume(condition)
template <class T>
void __stwb(T* to, T value) {
  *to = value;
}
inline dim3 blockIdx, gridDim;

namespace emulated_cuda {

// A warp of threads, which exchange values.
constexpr unsigned warp_size = 32;
struct Warp {
  Barrier barrier{warp_size};
  uint64_t slots[warp_size];
};

struct Block {
  Barrier barrier;
  std::vector<Warp> warps;
};
inline Block* block = nullptr;
inline Fibers fibers;

template <class T>
T exchange(T value, unsigned apart) {
  const unsigned lane = threadIdx.x % warp_size;
  Warp& warp = block->warps[threadIdx.x / warp_size];
  std::memcpy(&warp.slots[lane], &value, sizeof(T));
  warp.barrier.arrive_and_wait();
  std::memcpy(&value, &warp.slots[lane ^ apart], sizeof(T));
  warp.barrier.arrive_and_wait();
  return value;
}

template <class Parameters>
void run_grid(void (*kernel)(Parameters), dim3 grid, unsigned threads, const Parameters& parameters) {
  gridDim = grid;
  for (blockIdx = {0}; blockIdx.x < grid.x; ++blockIdx.x) {
    Block its{Barrier(threads), std::vector<Warp>(threads / warp_size)};
    block = &its;
    fibers.run(threads, [&] {
      kernel(parameters);
      its.barrier.drop();
    });
  }
}

}  // namespace emulated_cuda
