#pragma once

// The CUDA implementations of the loops, which nvcc compiles for every operation of kernels/operations.h. They only enqueue work.

#include <span>

#include "core/execution_context.h"
#include "core/tensor_list.h"
#include "kernels/operations.h"

namespace dltrain::cuda {

template <class Operation>
struct ForEach {
  void (*enqueue)(const ExecutionContext& context, const ListOf<Operation>& list, const Operation& operation);
};
template <class Operation>
struct MapBlocks {
  void (*enqueue)(const ExecutionContext& context, std::span<const Job<Operation>> jobs);
};
template <class Reduction>
struct Reduce {
  void (*enqueue)(const ExecutionContext& context, const ListOf<Reduction>& list, const Reduction& reduction);
};

extern const Table<ForEach, Elementwise> for_each_table;
extern const Table<MapBlocks, Blockwise> map_blocks_table;
extern const Table<Reduce, Reductions> reduce_table;

}  // namespace dltrain::cuda
