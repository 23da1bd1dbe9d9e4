#pragma once

#include <cstdint>
#include <vector>

#include "core/execution_context.h"
#include "core/tensor_list.h"

namespace dltrain {

// What a pass over many elements can yield, where they lie. Both or neither.
struct Statistics {
  double* sum_squares = nullptr;  // added in an order that depends on the numbers of elements alone
  float* found_inf = nullptr;     // 1 where an element is not finite, else 0
};

// numbers[0..count) become one sum, in place; behind them is room for rests_of(count) more. Also of none, whose sum is 0.
int64_t rests_of(int64_t count);
void add_up(const ExecutionContext& context, double* numbers, int64_t count, const Statistics& statistics);

// Of each tensor of the list, one number each.
void sum_squares(const ExecutionContext& context, const TensorList<1>& list, double* sums);

// Of all tensors of all lists.
void sum_squares(const ExecutionContext& context, const std::vector<TensorList<1>>& lists, const Statistics& statistics);

}  // namespace dltrain
