#include "kernels/cuda/batch.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/tile.h"
#include "kernels/operations.h"

namespace dltrain::cuda {

namespace {

constexpr int warps = threads / warp;  // per block; each processes one tile at a time

template <class Operation>
concept Receives = requires(Operation operation) { operation.received; };

template <class Operation>
concept InLists = requires { Operation::in_lists; };

// Jobs, and the pointers to the messages that they receive, by value: the host's lists of them no longer exist when the kernel runs.
template <class Operation, int capacity, int messages>
struct Blocks {
  int size = 0, received_size = 0;
  int64_t tiles = 0;
  int64_t first_tile[capacity];
  int first_received[capacity];
  Job<Operation> jobs[capacity];
  const uint8_t* received[messages];

  bool has_room_for(const Operation& operation) const {
    if (size == capacity) return false;
    if constexpr (Receives<Operation>) return received_size + operation.count <= messages;
    return true;
  }

  void add(const Job<Operation>& job) {
    jobs[size] = job;
    first_tile[size] = tiles;
    first_received[size] = received_size;
    tiles += (job.numel + Operation::elements - 1) / Operation::elements;
    if constexpr (Receives<Operation>) {
      std::copy_n(job.operation.received, job.operation.count, received + received_size);
      received_size += job.operation.count;
    }
    ++size;
  }

  DLT_HD int job_of(int64_t tile) const {
    if constexpr (capacity == 1) return 0;
    return stretch_of(tile, size, [this](int job) DLT_HD_LAMBDA { return first_tile[job]; });
  }
};

template <class Operation, int capacity, int messages>
__global__ void __launch_bounds__(threads, resident)
    map_blocks_kernel(const __grid_constant__ Blocks<Operation, capacity, messages> blocks) {
  constexpr int size = Operation::elements;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / warp; index < blocks.tiles;
       index += gridDim.x * int64_t{warps}) {
    const int job = blocks.job_of(index);
    const auto& [numel, operation] = blocks.jobs[job];
    const int64_t own = index - (capacity == 1 ? 0 : blocks.first_tile[job]), rest = numel - own * size;
    const auto process = [&](auto tile) {
      if constexpr (Receives<Operation>) {
        operation(tile, blocks.received + (capacity == 1 ? 0 : blocks.first_received[job]));
      } else {
        operation(tile);
      }
    };
    if (rest >= size) {
      process(Tile<size, true>(own, size));
    } else {
      process(Tile<size, false>(own, static_cast<int>(rest)));
    }
  }
}

template <int capacity, int messages, class Operation>
void enqueue_up_to(const ExecutionContext& context, std::span<const Job<Operation>> jobs) {
  using B = Blocks<Operation, capacity, messages>;
  static_assert(sizeof(B) <= parameter_bytes);
  while (!jobs.empty()) {
    B blocks;
    while (!jobs.empty() && blocks.has_room_for(jobs.front().operation)) {
      blocks.add(jobs.front());
      jobs = jobs.subspan(1);
    }
    if constexpr (Receives<Operation>) {
      const int count = jobs.empty() ? 0 : jobs.front().operation.count;
      dltrain::check(blocks.size > 0, "received: expected at most ", messages, " messages on CUDA, got ", count);
    }
    launch(context, map_blocks_kernel<Operation, capacity, messages>, (blocks.tiles + warps - 1) / warps, blocks, "starting map_blocks");
  }
}

template <class Operation>
bool fit(std::span<const Job<Operation>> jobs, size_t capacity, int messages) {
  if constexpr (Receives<Operation>) {
    for (const auto& [numel, operation] : jobs) messages -= operation.count;
  }
  return jobs.size() <= capacity && messages >= 0;
}

// The time of a launch grows with the size of the parameters, also if most of them are unused, so few jobs have a kernel of their own.
template <class Operation>
void enqueue(const ExecutionContext& context, std::span<const Job<Operation>> jobs) {
  constexpr int few_messages = Receives<Operation> ? 128 : 1, messages = Receives<Operation> ? 1200 : 1;
  constexpr auto a_job = static_cast<int>(sizeof(Job<Operation>) + sizeof(int64_t) + sizeof(int));
  constexpr int few = InLists<Operation> ? 16 : 1;
  constexpr int most = (parameter_bytes - 64 - messages * static_cast<int>(sizeof(void*))) / a_job;
  if constexpr (InLists<Operation>) {
    if (!fit(jobs, few, few_messages)) return enqueue_up_to<most, messages>(context, jobs);
  }
  enqueue_up_to<few, few_messages>(context, jobs);
}

}  // namespace

const Table<MapBlocks, Blockwise> map_blocks_table =
    make_table<MapBlocks, Blockwise>([]<class O>(std::type_identity<O>) { return enqueue<O>; });

}  // namespace dltrain::cuda
