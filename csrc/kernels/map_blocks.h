#pragma once

#include "core/place.h"
#include "kernels/cpu/map_blocks.h"
#include "kernels/cuda/launch.h"

namespace dltrain {

// For each block of Operation::elements out of numel: adds the operands in their order, element by element, and emits the sums.
template <class Operation>
void map_blocks(const Place& place, int64_t numel, const Operation& operation) {
  if constexpr (built_with_cuda) {
    if (place.on_cuda()) return std::get<cuda::MapBlocks<Operation>>(cuda::map_blocks_table).enqueue(place, numel, operation);
  }
  cpu::map_blocks(place, numel, operation);
}

}  // namespace dltrain
