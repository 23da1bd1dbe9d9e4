#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/host_device.h"
#include "core/tensor_list.h"
#include "kernels/update.h"
#include "math/optim/rule.h"

// Operations of reduce. An Element is called with the number of the sum, as a type, and one element of each stream. results(row, numbers)
// is where the sums of a row go, by the row's place in the list and its numbers.

namespace dltrain {

template <int sum>
using SumNumber = std::integral_constant<int, sum>;

// The sum of squares of a stream, one for each row.
struct Squares {
  static constexpr int streams = 1, sums = 1;
  using Numbers = None;
  struct Element {
    DLT_HD float operator()(SumNumber<0>, float x) const { return x; }
  };

  double* first;  // where the sum of the first row goes

  DLT_HD Element at(const None&) const { return {}; }
  DLT_HD double* results(int64_t row, const None&) const { return first + row; }
};

// The sums of squares that the next step of an optimizer needs for each tensor, over the streams of its update. It only reads the counters,
// which the step itself advances.
template <class Rule, unsigned states>
struct Norms {
  static constexpr int streams = Update<Rule, states>::streams, sums = math::norms_of<Rule>();
  using Numbers = NumbersOf<Rule>;
  using Element = typename Rule::Measure;
  static constexpr bool may_be_compact(int k) { return Update<Rule, states>::may_be_compact(k); }

  Rule rule;
  Step step;

  DLT_HD Element at(const Numbers& numbers) const {
    math::PerTensor tensor = per_tensor<Rule>(numbers, false);
    if constexpr (counters > 0) advance(tensor, numbers, std::make_integer_sequence<int, counters>{});
    return rule.measure(tensor, step.scalars.grad_factor(step.maximize));
  }
  DLT_HD double* results(int64_t, const Numbers& numbers) const { return numbers.sums; }

 private:
  static constexpr int counters = static_cast<int>(math::counters_of<Rule>().size());

  template <int... I>
  DLT_HD void advance(math::PerTensor& tensor, const Numbers& numbers, std::integer_sequence<int, I...>) const {
    float counts[] = {*numbers.counters()[I]...};
    rule.advance(counts[I]...);
    ((tensor.counters[I] = counts[I]), ...);
  }
};

}  // namespace dltrain
