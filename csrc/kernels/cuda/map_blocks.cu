#include "kernels/cuda/batch.h"
#include "kernels/cuda/launch.h"
#include "kernels/operations.h"

namespace dltrain::cuda {

namespace {

constexpr int unroll = 4;  // elements that a thread has under way, so that the loads of one do not wait for another's

// The operation and what its operands point to, by value, as the host's list of them is gone when the kernel runs.
template <class Operation, int capacity>
struct Blocks {
  Operation operation;
  int64_t numel;
  const float* received[capacity];
};

template <class Operation, int capacity>
__global__ void __launch_bounds__(threads) map_blocks_kernel(const __grid_constant__ Blocks<Operation, capacity> blocks) {
  using Arithmetic = typename Operation::Arithmetic;
  Operation operation = blocks.operation;
  operation.received = blocks.received;
  const int operands = operation.operands();
  const int64_t step = static_cast<int64_t>(gridDim.x) * threads * unroll;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * threads * unroll + threadIdx.x; first < blocks.numel; first += step) {
    float sum[unroll] = {};
    for (int k = 0; k < operands; ++k) {
      const auto operand = operation.operand(k);
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const int64_t i = first + u * threads;
        if (i < blocks.numel) sum[u] = k == 0 ? operand[i] : Arithmetic::add(sum[u], operand[i]);
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int64_t i = first + u * threads;
      if (i < blocks.numel) operation.emit(i, sum[u]);
    }
  }
}

template <int capacity, class Operation>
void enqueue_up_to(const Place& place, int64_t numel, const Operation& operation) {
  dltrain::check(operation.count <= capacity, "received: expected at most ", capacity, " operands on CUDA, got ", operation.count);
  Blocks<Operation, capacity> blocks;
  static_assert(sizeof(blocks) <= parameter_bytes);
  blocks.operation = operation;
  blocks.numel = numel;
  std::copy_n(operation.received, operation.count, blocks.received);
  launch(place, map_blocks_kernel<Operation, capacity>, (numel + threads * unroll - 1) / (threads * unroll), blocks, "starting map_blocks");
}

template <class Operation>
void enqueue(const Place& place, int64_t numel, const Operation& operation) {
  operation.count <= 16 ? enqueue_up_to<16>(place, numel, operation) : enqueue_up_to<4000>(place, numel, operation);
}

template <class... Operations>
constexpr std::tuple<MapBlocks<Operations>...> table(const std::tuple<Operations...>*) {
  return {MapBlocks<Operations>{enqueue<Operations>}...};
}

}  // namespace

const Table<MapBlocks, Blockwise> map_blocks_table = table(static_cast<const Blockwise*>(nullptr));

}  // namespace dltrain::cuda
