#pragma once

#include <cstdint>
#include <vector>

#include "core/execution_context.h"
#include "core/tensor_list.h"

namespace dltrain {

// Where a pass over many elements writes its results, in memory of their device. found_inf may be null; for decode both may be.
struct Statistics {
  double* sum_squares = nullptr;  // the order of the additions depends only on the numbers of elements
  float* found_inf = nullptr;     // 1 if an element is not finite, else 0
};

// Adds up numbers[0..count); the sum of no numbers is 0. The memory must have space for rests_of(count) partial sums behind the numbers.
int64_t rests_of(int64_t count);
void add_up(const ExecutionContext& context, double* numbers, int64_t count, const Statistics& statistics);

// Writes the sum of squares of each tensor of the list, one number per tensor.
void sum_squares(const ExecutionContext& context, const TensorList<1>& list, double* sums);

// The statistics of all tensors of all lists together.
void sum_squares(const ExecutionContext& context, const std::vector<TensorList<1>>& lists, const Statistics& statistics);

}  // namespace dltrain
