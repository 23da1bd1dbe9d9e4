#pragma once

#include "core/check.h"
#include "core/execution_context.h"
#include "core/tensor_list.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cuda/launch.h"

namespace dltrain {

// Computes Reduction::sums sums of squares for each row: results[s] = sum over i of element(s, x_0[i], ..., x_{K-1}[i])^2, where element =
// reduction.at(the row's numbers) and results = reduction.results(row, the row's numbers), in memory of the list's device. The order of the
// additions depends only on the length of the row. Streams in a compact format are decoded.
template <class Reduction>
void reduce(const ExecutionContext& context, const ListOf<Reduction>& list, const Reduction& reduction) {
  for (int k = 0; k < Reduction::streams; ++k) {
    check(!list.signature().formats[k].is_compact() || may_be_compact<Reduction>(k), "list: expected elements in stream ", k,
          ", got a compact format");
  }
  if constexpr (built_with_cuda) {
    if (context.on_cuda()) return std::get<cuda::Reduce<Reduction>>(cuda::reduce_table).enqueue(context, list, reduction);
  }
  cpu::reduce(context, list, reduction);
}

}  // namespace dltrain
