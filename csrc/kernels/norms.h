#pragma once

#include <type_traits>

#include "core/host_device.h"
#include "core/tensor_list.h"
#include "kernels/update.h"
#include "math/optim/rule.h"

// Operations of reduce. Their elements are called with the number of the sum, as a type, and one element of each stream.

namespace dltrain {

template <int sum>
using SumNumber = std::integral_constant<int, sum>;

// Of one stream.
struct Squares {
  static constexpr int streams = 1, sums = 1;
  using Numbers = None;
  struct Element {
    DLT_HD float operator()(SumNumber<0>, float x) const { return x; }
  };

  DLT_HD Element at(const None&) const { return {}; }
};

// What the step of an optimizer has to know of each tensor, from the streams of its update.
template <class Rule, unsigned states>
struct Norms {
  static constexpr int streams = Update<Rule, states>::streams, sums = math::norms_of<Rule>();
  using Numbers = NumbersOf<Rule>;
  using Element = typename Rule::Measure;

  Rule rule;

  DLT_HD Element at(const Numbers& numbers) const { return rule.measure(per_tensor<Rule>(numbers, false)); }
};

}  // namespace dltrain
