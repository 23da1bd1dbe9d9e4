#pragma once

#include <cstdint>
#include <functional>

#include "core/execution_context.h"
#include "kernels/cpu/instruction_set.h"

namespace dltrain::cpu {

template <class Operation>
void map_blocks(const ExecutionContext& context, int64_t numel, const Operation& operation) {
  constexpr int64_t size = Operation::elements, grain_size = (int64_t{1} << 17) / size;
  const auto loop = std::get<BlockLoop<Operation>>(loops().blocks);
  const auto run = [&](int64_t begin, int64_t end) { loop.run(operation, numel, begin, end); };
  context.parallel_for((numel + size - 1) / size, grain_size, std::cref(run));  // by reference, because a copy would be allocated
}

}  // namespace dltrain::cpu
