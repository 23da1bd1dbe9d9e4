#pragma once

#include "core/place.h"
#include "kernels/cpu/map_blocks.h"
#include "kernels/cuda/launch.h"

namespace dltrain {

// operation(tile) for each tile of Operation::elements out of numel. A tile holds the elements while they are worked on: in the first-level
// cache, or in the registers of a warp.
template <class Operation>
void map_blocks(const Place& place, int64_t numel, const Operation& operation) {
  if constexpr (built_with_cuda) {
    if (place.on_cuda()) return std::get<cuda::MapBlocks<Operation>>(cuda::map_blocks_table).enqueue(place, numel, operation);
  }
  cpu::map_blocks(place, numel, operation);
}

}  // namespace dltrain
