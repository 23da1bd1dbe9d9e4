#pragma once

#include "core/place.h"
#include "core/tensor_list.h"
#include "kernels/cpu/for_each.h"
#include "kernels/cuda/launch.h"

namespace dltrain {

// element(x_0[i], ..., x_{K-1}[i]) for every element of every row, where element = operation.at(the row's numbers); nothing if
// operation.skip(). K is Operation::streams; Operation::writes says which of them the element changes.
template <class Operation>
void for_each(const Place& place, const ListOf<Operation>& list, const Operation& operation) {
  if constexpr (built_with_cuda) {
    if (place.on_cuda()) return std::get<cuda::ForEach<Operation>>(cuda::for_each_table).enqueue(place, list, operation);
  }
  cpu::for_each(place, list, operation);
}

}  // namespace dltrain
