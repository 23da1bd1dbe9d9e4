#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "core/execution_context.h"
#include "core/tensor_list.h"
#include "kernels/cpu/instruction_set.h"
#include "math/sum_squares.h"

namespace dltrain::cpu {

// The rows are divided into parts of fixed length, which are reduced in any order and then merged in the order of the parts.
template <class Reduction>
void reduce(const ExecutionContext& context, const ListOf<Reduction>& list, const Reduction& reduction) {
  constexpr int64_t length = 1 << 14, grain_size = 16;
  struct Partial {
    int64_t row, first, last;
    std::array<double, Reduction::sums> sums;
  };
  std::vector<Partial> parts;
  for (int64_t row = 0; row < list.size(); ++row) {
    const int64_t numel = list.row(row).numel;
    for (int64_t first = 0; first < numel; first += length) parts.push_back({row, first, std::min(first + length, numel), {}});
  }
  const auto loop = std::get<ReduceLoop<Reduction>>(loops().reductions);
  context.parallel_for(static_cast<int64_t>(parts.size()), grain_size, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      auto& [row, first, last, sums] = parts[i];
      loop.run(reduction.at(list.row(row).numbers), list.signature(), list.row(row), first, last, sums.data());
    }
  });
  const auto results = [&](int64_t row) { return reduction.results(row, list.row(row).numbers); };
  for (int64_t row = 0; row < list.size(); ++row) std::fill_n(results(row), Reduction::sums, math::SumSquares::none());
  for (const Partial& part : parts) {
    double* const sums = results(part.row);
    for (int s = 0; s < Reduction::sums; ++s) sums[s] = math::SumSquares::merge(sums[s], part.sums[s]);
  }
}

}  // namespace dltrain::cpu
