#pragma once

#include "core/check.h"
#include "core/execution_context.h"
#include "core/tensor_list.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cuda/launch.h"

namespace dltrain {

// Computes Reduction::sums sums of squares for each row: results[s] = sum over i of element(s, x_0[i], ..., x_{K-1}[i])^2, where element =
// reduction.at(the row's numbers) and results = reduction.results(row, the row's numbers), in memory of the list's device. The order of the
// additions depends only on the length of the row. No stream may have a codec's format.
template <class Reduction>
void reduce(const ExecutionContext& context, const ListOf<Reduction>& list, const Reduction& reduction) {
  check(!list.signature().is_coded(), "list: expected elements in all streams, got a codec");
  if constexpr (built_with_cuda) {
    if (context.on_cuda()) return std::get<cuda::Reduce<Reduction>>(cuda::reduce_table).enqueue(context, list, reduction);
  }
  cpu::reduce(context, list, reduction);
}

}  // namespace dltrain
