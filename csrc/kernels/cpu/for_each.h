#pragma once

#include <cstdint>

#include "core/cache_line.h"
#include "core/execution_context.h"
#include "core/tensor_list.h"
#include "kernels/cpu/instruction_set.h"

namespace dltrain::cpu {

template <class Operation>
void for_each(const ExecutionContext& context, const ListOf<Operation>& list, const Operation& operation) {
  // In elements: processing so many takes longer than waking another core.
  constexpr int64_t grain_size = 1 << 18;
  if (operation.skip()) return;
  const auto loop = std::get<ElementLoop<Operation>>(loops().elements);
  context.parallel_for(list.numel(), grain_size, [&](int64_t begin, int64_t end) {
    typename Operation::Element element;
    const typename Operation::Numbers* known = nullptr;  // of the row for which element was computed
    list.visit(begin, end, [&](int64_t index, const auto& row, int64_t first, int64_t last) {
      // The processor predicts accesses within a tensor, but not the address of the next small tensor.
      if (constexpr int64_t ahead = 4; index + ahead < list.size()) {
        for (const void* stream : list.row(index + ahead).data) {
          for (int64_t line = 0; line < 4; ++line) __builtin_prefetch(static_cast<const char*>(stream) + cache_line * line);
        }
      }
      // Adjacent rows mostly have the same element, and computing AdamW's takes as long as the update of a small tensor.
      if (!known || !Operation::same(row.numbers, *known)) element = operation.at(row.numbers);
      known = &row.numbers;
      loop.run(element, list.signature(), row, first, last, random_of(operation, row.numbers));
    });
  });
}

}  // namespace dltrain::cpu
