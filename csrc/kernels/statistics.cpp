#include "kernels/statistics.h"

#include "core/memory.h"
#include "kernels/decode.h"
#include "kernels/map_blocks.h"
#include "kernels/reduce.h"

namespace dltrain {

namespace {

int64_t tiles_of(int64_t count) { return (count + SumTiles::elements - 1) / SumTiles::elements; }

}  // namespace

int64_t rests_of(int64_t count) {
  int64_t size = 0;
  for (; count > SumTiles::elements; size += count) count = tiles_of(count);
  return size;
}

void add_up(const ExecutionContext& context, double* numbers, int64_t count, const Statistics& statistics) {
  for (; count > SumTiles::elements; count = tiles_of(count)) {
    double* const sums = numbers + count;
    map_blocks(context, count, SumTiles{numbers, count, sums, nullptr});
    numbers = sums;
  }
  map_blocks(context, SumTiles::elements, SumTiles{numbers, count, statistics.sum_squares, statistics.found_inf});
}

void sum_squares(const ExecutionContext& context, const TensorList<1>& list, double* sums) { reduce(context, list, Squares{sums}); }

void sum_squares(const ExecutionContext& context, const std::vector<TensorList<1>>& lists, const Statistics& statistics) {
  int64_t rows = 0;
  for (const auto& list : lists) rows += list.size();
  const Memory memory(context, (rows + rests_of(rows)) * static_cast<int64_t>(sizeof(double)));
  auto* const sums = static_cast<double*>(memory.data());
  double* next = sums;
  for (const auto& list : lists) {
    sum_squares(context, list, next);
    next += list.size();
  }
  add_up(context, sums, rows, statistics);
}

}  // namespace dltrain
