#pragma once

#include "core/check.h"
#include "core/execution_context.h"
#include "core/tensor_list.h"
#include "kernels/cpu/for_each.h"
#include "kernels/cuda/launch.h"

namespace dltrain {

// Calls element(x_0[i], ..., x_{K-1}[i]) for every element i of every row, where element = operation.at(the row's numbers), unless
// operation.skip(). K is Operation::streams, and Operation::writes says which streams the call changes. Streams in a compact format are
// decoded when they are read, and encoded when they are written.
template <class Operation>
void for_each(const ExecutionContext& context, const ListOf<Operation>& list, const Operation& operation) {
  for (int k = 0; k < Operation::streams; ++k) {
    check(!list.signature().formats[k].is_compact() || may_be_compact<Operation>(k), "list: expected elements in stream ", k,
          ", got a compact format");
  }
  if constexpr (built_with_cuda) {
    if (context.on_cuda()) return std::get<cuda::ForEach<Operation>>(cuda::for_each_table).enqueue(context, list, operation);
  }
  cpu::for_each(context, list, operation);
}

}  // namespace dltrain
