#pragma once

#include <type_traits>

#include "core/host_device.h"
#include "core/tensor_list.h"
#include "kernels/update.h"
#include "math/optim/rule.h"

// Operations of reduce. An Element is called with the number of the sum, as a type, and one element of each stream.

namespace dltrain {

template <int sum>
using SumNumber = std::integral_constant<int, sum>;

// The sum of squares of a stream.
struct Squares {
  static constexpr int streams = 1, sums = 1;
  using Numbers = None;
  struct Element {
    DLT_HD float operator()(SumNumber<0>, float x) const { return x; }
  };

  DLT_HD Element at(const None&) const { return {}; }
};

// The sums of squares that the step of an optimizer needs for each tensor, over the streams of its update.
template <class Rule, unsigned states>
struct Norms {
  static constexpr int streams = Update<Rule, states>::streams, sums = math::norms_of<Rule>();
  using Numbers = NumbersOf<Rule>;
  using Element = typename Rule::Measure;

  Rule rule;
  Step step;

  DLT_HD Element at(const Numbers& numbers) const {
    return rule.measure(per_tensor<Rule>(numbers, false), step.scalars.grad_factor(step.maximize));
  }
};

}  // namespace dltrain
