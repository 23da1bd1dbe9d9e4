#pragma once

#include <algorithm>
#include <cstdint>

#include "core/execution_context.h"
#include "core/memory.h"
#include "core/tensor_list.h"
#include "kernels/for_each.h"
#include "kernels/norms.h"
#include "kernels/reduce.h"
#include "kernels/update.h"

namespace dltrain {

// The counters of a rule, as a list of rows of one number each.
template <class Rule>
using CountersOf = TensorList<std::max(static_cast<int>(math::counters_of<Rule>().size()), 1)>;

// Computes the norms that the rule needs into memory to which the rows then point, if the flag is set and they do not point to any yet.
template <class Rule, unsigned states>
Memory take_norms(const ExecutionContext& context, const Rule& rule, const Step& step, bool flag, ListOf<Update<Rule, states>>& list) {
  Memory memory;
  if constexpr (constexpr int norms = math::norms_of<Rule>(); norms > 0) {
    if (!flag || list.size() == 0 || list.row(0).numbers.sums) return memory;
    memory = Memory(context, norms * list.size() * static_cast<int64_t>(sizeof(double)));
    auto* sums = static_cast<double*>(memory.data());
    for (int64_t row = 0; row < list.size(); ++row, sums += norms) list.row(row).numbers.sums = sums;
    reduce(context, list, Norms<Rule, states>{rule, step});
  }
  return memory;
}

// One step of an optimizer over the rows of the list, whose flag is the same, and their counters.
template <class Rule, unsigned states>
void take_step(const ExecutionContext& context, const Rule& rule, const Step& step, bool flag, ListOf<Update<Rule, states>>& list,
               const CountersOf<Rule>& counts) {
  const Memory own_sums = take_norms<Rule, states>(context, rule, step, flag, list);
  if constexpr (math::counters_of<Rule>().size() > 0) for_each(context, counts, Advance<Rule>{rule, step.scalars});
  for_each(context, list, Update<Rule, states>{rule, step, flag});
}

}  // namespace dltrain
