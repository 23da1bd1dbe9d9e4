#pragma once

// The lists of all operations. The loops of each device and each instruction set are compiled for the operations in these lists.

#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/codecs.h"
#include "kernels/decode.h"
#include "kernels/elementwise.h"
#include "kernels/encode_sum.h"
#include "kernels/norms.h"
#include "kernels/optimizers.h"
#include "kernels/outer_step.h"
#include "kernels/unscale_and_clip.h"
#include "kernels/update.h"
#include "math/philox.h"

namespace dltrain {

template <class Rule, std::size_t... I>
std::tuple<Update<Rule, math::choices_of<Rule>()[I]>...> updates_of(std::index_sequence<I...>);
template <class Rule>
using UpdatesOf = decltype(updates_of<Rule>(std::make_index_sequence<math::choices_of<Rule>().size()>()));
template <class Rule>
using AdvanceOf = std::conditional_t<math::counters_of<Rule>().size() == 0, std::tuple<>, std::tuple<Advance<Rule>>>;
template <class... Rules>
auto elementwise_of(const std::tuple<Rules...>&)
    -> decltype(std::tuple_cat(std::declval<std::tuple<Poison, Copy, Extend, Subtract, Accumulate, Compensate>>(),
                               std::declval<AdvanceOf<Rules>>()..., std::declval<UpdatesOf<Rules>>()...));
using Elementwise = decltype(elementwise_of(std::declval<Optimizers>()));

template <class... C>
std::tuple<EncodeSum<C>..., Decode<C>..., OuterStep<C>..., SumTiles, UnscaleAndClip> blockwise_of(const std::tuple<C...>&);
using Blockwise = decltype(blockwise_of(std::declval<Codecs>()));

// A job of map_blocks: an operation over numel elements.
template <class Operation>
struct Job {
  int64_t numel;
  Operation operation;
};

template <class Rule, std::size_t... I>
auto norms_of(std::index_sequence<I...>)
    -> std::conditional_t<math::norms_of<Rule>() == 0, std::tuple<>, std::tuple<Norms<Rule, math::choices_of<Rule>()[I]>...>>;
template <class Rule>
using NormsOf = decltype(norms_of<Rule>(std::make_index_sequence<math::choices_of<Rule>().size()>()));
template <class... Rules>
auto reductions_of(const std::tuple<Rules...>&)
    -> decltype(std::tuple_cat(std::declval<std::tuple<Squares>>(), std::declval<NormsOf<Rules>>()...));
using Reductions = decltype(reductions_of(std::declval<Optimizers>()));

// Whether the operation accepts a compact format for its k-th stream; whether it accepts one for any stream.
template <class Operation>
constexpr bool may_be_compact(int k) {
  if constexpr (requires { Operation::may_be_compact(k); }) return Operation::may_be_compact(k);
  return false;
}
template <class Operation>
inline constexpr bool takes_compact = [] {
  bool any = false;
  for (int k = 0; k < Operation::streams; ++k) any |= may_be_compact<Operation>(k);
  return any;
}();

// The random numbers with which a row's elements are rounded.
template <class Operation>
DLT_HD math::RandomStream random_of(const Operation& operation, const typename Operation::Numbers& numbers) {
  if constexpr (requires { operation.random(numbers); }) return operation.random(numbers);
  return {};
}

// The index of a row's first element, from the numbers of the row.
template <class Numbers>
DLT_HD int64_t first_index(const Numbers& numbers) {
  if constexpr (requires { numbers.first; }) return numbers.first;
  return 0;
}

// Calls an element function of for_each. One that is_indexed also gets the index of the element.
template <class Element, class... Streams>
DLT_HD void apply(const Element& element, int64_t index, Streams&... streams) {
  if constexpr (requires { Element::is_indexed; }) {
    element(index, streams...);
  } else {
    element(streams...);
  }
}

// A tuple with one entry for each operation of a list.
template <template <class> class Entry, class List>
struct TableOf;
template <template <class> class Entry, class... Operations>
struct TableOf<Entry, std::tuple<Operations...>> {
  using type = std::tuple<Entry<Operations>...>;

  template <class Make>
  static constexpr type make(Make make) {
    return {Entry<Operations>{make(std::type_identity<Operations>{})}...};
  }
};
template <template <class> class Entry, class List>
using Table = typename TableOf<Entry, List>::type;

// A table whose entries hold make(type_identity<Operation>).
template <template <class> class Entry, class List, class Make>
constexpr Table<Entry, List> make_table(Make make) {
  return TableOf<Entry, List>::make(make);
}

}  // namespace dltrain
