#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/place.h"
#include "core/tensor_list.h"
#include "kernels/cpu/instruction_set.h"

namespace dltrain::cpu {

// Parts of fixed length, reduced in any order, then merged in theirs.
template <class Reduction>
void reduce(const Place& place, const TensorList<1>& list, typename Reduction::Value* results) {
  constexpr int64_t length = 1 << 14, grain = 16;
  struct Part {
    int64_t row;
    Elements values;
    int64_t numel;
    typename Reduction::Value value;
  };
  std::vector<Part> parts;
  for (int64_t row = 0; row < list.size(); ++row) {
    const Elements values{list.row(row).data[0], list.form().dtypes[0]};
    const int64_t numel = list.row(row).numel;
    for (int64_t first = 0; first < numel; first += length) parts.push_back({row, values.from(first), std::min(length, numel - first), {}});
    results[row] = Reduction::none();
  }
  const auto loop = std::get<ReduceLoop<Reduction>>(loops().reductions);
  place.parallel_for(static_cast<int64_t>(parts.size()), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) parts[i].value = loop.run(parts[i].values, parts[i].numel);
  });
  for (const Part& part : parts) results[part.row] = Reduction::merge(results[part.row], part.value);
}

}  // namespace dltrain::cpu
