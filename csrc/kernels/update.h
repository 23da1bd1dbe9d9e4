#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "core/host_device.h"
#include "core/tensor_list.h"
#include "kernels/scalars.h"
#include "math/narrowing.h"
#include "math/optim/rule.h"
#include "math/philox.h"

namespace dltrain {

// Pointers to numbers of a row, in memory of its tensors' device.
template <class T, int count>
struct Pointers {
  static constexpr int size = count;
  const T* values[count] = {};
  DLT_HD const T* operator[](int i) const { return values[i]; }
};
template <class T>
struct Pointers<T, 0> {
  static constexpr int size = 0;
  DLT_HD const T* operator[](int) const { return nullptr; }
};

// Where the sums of squares of a row's norms are, one after another, in memory of its tensors' device.
template <int count>
struct SumsAt {
  static constexpr int norms = count;
  double* sums = nullptr;  // null if the row does not have the rule's flag
};
template <>
struct SumsAt<0> {
  static constexpr int norms = 0;
};

// Which elements a row has: the index of its first element, which is not 0 if the row is a part of a tensor, and the number of the tensor.
template <bool exists>
struct Origin {
  int64_t first = 0;
  uint32_t number = 0;
};
template <>
struct Origin<false> {};

// The counters, the sums and the origin are bases, because an empty base takes no space.
template <class Rule, class Counters = Pointers<float, static_cast<int>(math::counters_of<Rule>().size())>>
struct NumbersOf : Counters, SumsAt<math::norms_of<Rule>()>, Origin<math::is_indexed<Rule>() || math::is_compact<Rule>()> {
  DLT_HD Counters& counters() { return *this; }
  DLT_HD const Counters& counters() const { return *this; }
};

// The numbers of a tensor for the rule. The sums of its norms are read only if the flag is set.
template <class Rule>
DLT_HD math::PerTensor per_tensor(const NumbersOf<Rule>& numbers, bool flag) {
  math::PerTensor tensor;
  for (int i = 0; i < numbers.counters().size; ++i) tensor.counters[i] = *numbers.counters()[i];
  if constexpr (NumbersOf<Rule>::norms > 0) {
    for (int i = 0; i < numbers.norms && flag; ++i) tensor.sums[i] = numbers.sums[i];
  }
  tensor.flag = flag;
  return tensor;
}

// An operation of for_each: a step of an optimizer. Streams: parameter, gradient, and the states whose bits are set.
template <class Rule, unsigned states>
struct Update {
  static constexpr int streams = 2 + std::popcount(states);
  DLT_HD static constexpr bool writes(int k) { return k != 1; }
  // state_of[k] is the index, among the rule's states, of the state that is the k-th stream.
  static constexpr auto state_of = [] {
    std::array<int, streams> found{};
    for (int k = 2, state = 0; k < streams; ++state) {
      if (states >> state & 1) found[k++] = state;
    }
    return found;
  }();
  static constexpr bool may_be_compact(int k) { return k == 0 ? math::is_compact<Rule>() : k >= 2 && Rule::states[state_of[k]].coded; }
  using Element = typename Rule::template Element<states>;
  using Numbers = NumbersOf<Rule>;

  Rule rule;
  Step step;
  bool flag = false;  // the rule's flag, which is the same for all rows

  DLT_HD bool skip() const { return step.scalars.skip(); }
  DLT_HD Element at(const Numbers& numbers) const {
    return rule.at(per_tensor<Rule>(numbers, flag), step.scalars.lr_or(step.lr), step.scalars.grad_factor(step.maximize));
  }
  DLT_HD math::RandomStream random(const Numbers& numbers) const
    requires(math::is_compact<Rule>())
  {
    return {step.seed, static_cast<uint32_t>(step.scalars.steps ? *step.scalars.steps : 0), math::of_parameters | numbers.number};
  }
  // Whether two rows have the same Element.
  static bool same(const Numbers& numbers, const Numbers& others) {
    bool equal = true;
    for (int i = 0; i < numbers.counters().size; ++i) equal = equal && *numbers.counters()[i] == *others.counters()[i];
    if constexpr (Numbers::norms > 0) equal = equal && numbers.sums == others.sums;
    return equal;
  }
};

// An operation of for_each: it counts a step. Its streams are the rule's counters.
template <class Rule>
struct Advance {
  static constexpr int streams = static_cast<int>(Rule::counters.size());
  DLT_HD static constexpr bool writes(int) { return true; }
  struct Element {
    Rule rule;
    template <class... Counters>
    DLT_HD void operator()(Counters&... counters) const {
      rule.advance(counters...);
    }
  };
  using Numbers = None;

  Rule rule;
  Scalars scalars;

  DLT_HD bool skip() const { return scalars.skip(); }
  DLT_HD Element at(const None&) const { return {rule}; }
  static bool same(const None&, const None&) { return true; }
};

}  // namespace dltrain
