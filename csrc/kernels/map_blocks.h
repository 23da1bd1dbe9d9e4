#pragma once

#include <span>

#include "core/execution_context.h"
#include "kernels/cpu/map_blocks.h"
#include "kernels/cuda/launch.h"

namespace dltrain {

// Calls operation(tile) for each tile of Operation::elements elements, out of numel. A tile holds its elements while they are processed: in
// the first-level cache on the CPU, in the registers of a warp on CUDA.
//
// The jobs are independent of each other. On CUDA many jobs become one launch.
template <class Operation>
void map_blocks(const ExecutionContext& context, std::span<const Job<Operation>> jobs) {
  if constexpr (built_with_cuda) {
    if (context.on_cuda()) return std::get<cuda::MapBlocks<Operation>>(cuda::map_blocks_table).enqueue(context, jobs);
  }
  for (const auto& [numel, operation] : jobs) cpu::map_blocks(context, numel, operation);
}

template <class Operation>
void map_blocks(const ExecutionContext& context, int64_t numel, const Operation& operation) {
  const Job<Operation> job{numel, operation};
  map_blocks(context, std::span<const Job<Operation>>(&job, 1));
}

}  // namespace dltrain
