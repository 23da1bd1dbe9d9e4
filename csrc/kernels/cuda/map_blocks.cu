#include "kernels/cuda/batch.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/tile.h"
#include "kernels/operations.h"

namespace dltrain::cuda {

namespace {

constexpr int warps = threads / warp;  // of a block, a tile each

// The operation and the messages that it receives, by value, as the host's list of them is gone when the kernel runs.
template <class Operation, int capacity>
struct Blocks {
  Operation operation;
  int64_t numel;
  const uint8_t* received[capacity];
};

template <class Operation>
concept Receives = requires(Operation operation) { operation.received; };

template <class Operation, int capacity>
__global__ void __launch_bounds__(threads, resident) map_blocks_kernel(const __grid_constant__ Blocks<Operation, capacity> blocks) {
  constexpr int size = Operation::elements;
  const int64_t tiles = (blocks.numel + size - 1) / size;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / warp; index < tiles; index += gridDim.x * int64_t{warps}) {
    const int64_t rest = blocks.numel - index * size;
    Tile<size> tile(index, rest < size ? static_cast<int>(rest) : size);
    if constexpr (Receives<Operation>) {
      blocks.operation(tile, blocks.received);
    } else {
      blocks.operation(tile);
    }
  }
}

template <int capacity, class Operation>
void enqueue_up_to(const Place& place, int64_t numel, const Operation& operation) {
  constexpr int64_t size = warps * int64_t{Operation::elements};
  Blocks<Operation, capacity> blocks;
  static_assert(sizeof(blocks) <= parameter_bytes);
  blocks.operation = operation;
  blocks.numel = numel;
  if constexpr (Receives<Operation>) {
    dltrain::check(operation.count <= capacity, "received: expected at most ", capacity, " messages on CUDA, got ", operation.count);
    std::copy_n(operation.received, operation.count, blocks.received);
  }
  launch(place, map_blocks_kernel<Operation, capacity>, (numel + size - 1) / size, blocks, "starting map_blocks");
}

template <class Operation>
void enqueue(const Place& place, int64_t numel, const Operation& operation) {
  if constexpr (Receives<Operation>) {
    if (operation.count > 16) return enqueue_up_to<4000>(place, numel, operation);
  }
  enqueue_up_to<16>(place, numel, operation);
}

}  // namespace

const Table<MapBlocks, Blockwise> map_blocks_table =
    make_table<MapBlocks, Blockwise>([]<class O>(std::type_identity<O>) { return enqueue<O>; });

}  // namespace dltrain::cuda
