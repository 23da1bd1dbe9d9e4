#pragma once

#include "core/place.h"
#include "core/tensor_list.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cuda/launch.h"

namespace dltrain {

// results[row] = the reduction over the row's elements, in an order that depends on its length alone. The results lie where the list does.
template <class Reduction>
void reduce(const Place& place, const TensorList<1>& list, typename Reduction::Value* results) {
  if constexpr (built_with_cuda) {
    if (place.on_cuda()) return std::get<cuda::Reduce<Reduction>>(cuda::reduce_table).enqueue(place, list, results);
  }
  cpu::reduce<Reduction>(place, list, results);
}

}  // namespace dltrain
