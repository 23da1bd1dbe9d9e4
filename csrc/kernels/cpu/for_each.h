#pragma once

#include <cstdint>
#include <utility>

#include "core/place.h"
#include "core/tensor_list.h"

namespace dltrain::cpu {

namespace detail {
template <class Element, int K, std::size_t... I>
void apply(const Element& element, const std::array<float*, K>& data, int64_t begin, int64_t end, std::index_sequence<I...>) {
  // Rows never overlap, which lets the compiler work on many elements at once.
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) element(data[I][i]...);
}
}  // namespace detail

// Calls element(x_0[i], ..., x_{K-1}[i]) for every element of every row, where element = prepare(row index).
template <int K, class Prepare>
void for_each(const Place& place, const TensorList<K>& list, const Prepare& prepare) {
  // So much takes a core longer than waking another one.
  constexpr int64_t grain = 1 << 18;
  place.parallel_for(list.numel(), grain, [&](int64_t begin, int64_t end) {
    list.visit(begin, end, [&](int64_t index, const auto& row, int64_t first, int64_t last) {
      // The processor foresees where a tensor goes on, but not where the next small one lies.
      if (constexpr int64_t ahead = 4; index + ahead < list.size()) {
        for (const float* stream : list.row(index + ahead).data) {
          for (int line = 0; line < 4; ++line) __builtin_prefetch(stream + 16 * line);
        }
      }
      const auto element = prepare(index);
      const auto data = row.data;
      detail::apply<decltype(element), K>(element, data, first, last, std::make_index_sequence<K>{});
    });
  });
}

}  // namespace dltrain::cpu
