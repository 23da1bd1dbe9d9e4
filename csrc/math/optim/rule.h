#pragma once

// An optimizer is a rule: a struct of its hyper-parameters, whose defaults are the members' own, and a table of what it keeps and needs.
// Kernels, bindings, ops and the Python layer are made from it:
//
//   static constexpr const char* name            of the op, which is called name_
//   static constexpr auto hyper()                std::tuple of Hyper
//   static constexpr std::array states           of State: tensors of the parameter's shape
//   static constexpr std::array counters         of Counter, where it has any: numbers of a parameter; advance(float&...) counts a step
//   static constexpr int norms                   of a tensor, where it needs any, of what measure(PerTensor) makes of each element: a
//   using Measure                                function (number of the norm as a type, parameter, gradient, state&...) -> float
//   static constexpr Flag flag                   where some tensors are to be treated otherwise than others
//   template <unsigned states> using Element     what one step does to an element: (parameter&, gradient, state&...), where states are the
//                                                bits of those that there are
//   needs(k)                                     whether these hyper-parameters use the optional state k; without it all that is given is
//   used at(PerTensor, lr, grad_factor)               the element function's numbers; grad_factor: what gradients are multiplied by

#include <array>
#include <tuple>

#include "core/host_device.h"

namespace dltrain::math {

template <class Rule, class T>
struct Hyper {
  using Member = T Rule::*;
  const char* name;
  Member member;
};
template <class Rule, class T>
Hyper(const char*, T Rule::*) -> Hyper<Rule, T>;

struct State {
  const char* key;
  bool optional = false;     // not all parameter groups have it
  float initial = 0.0f;      // before the first step
  bool nonnegative = false;  // whatever the gradients are
  bool coded = false;        // kernels take it in a codec's format, too
};

struct Counter {
  const char* key;
  float initial = 0.0f;
};

struct Flag {
  const char* name = nullptr;
  bool by_default = false;
};

// Of one tensor, when a step is made.
struct PerTensor {
  static constexpr int most = 2;
  double counters[most] = {};  // already advanced
  double sums[most] = {};      // of the squares of what the norms are of; where the tensor has the flag
  bool flag = false;
};

template <class Rule>
constexpr auto counters_of() {
  if constexpr (requires { Rule::counters; }) {
    return Rule::counters;
  } else {
    return std::array<Counter, 0>{};
  }
}

template <class Rule>
constexpr int norms_of() {
  if constexpr (requires { Rule::norms; }) {
    return Rule::norms;
  } else {
    return 0;
  }
}

template <class Rule>
constexpr Flag flag_of() {
  if constexpr (requires { Rule::flag; }) {
    return Rule::flag;
  } else {
    return {};
  }
}

// For each choice of optional states the bits of all that there are then, fewest first.
template <class Rule>
constexpr auto choices_of() {
  constexpr auto count = static_cast<unsigned>(Rule::states.size());
  constexpr auto is_choice = [](unsigned bits) {
    for (unsigned k = 0; k < count; ++k) {
      if (!Rule::states[k].optional && !(bits >> k & 1)) return false;
    }
    return true;
  };
  constexpr auto optional = [] {
    unsigned states = 0;
    for (const State& state : Rule::states) states += state.optional;
    return states;
  }();
  std::array<unsigned, 1u << optional> choices{};
  for (unsigned bits = 0, next = 0; bits < 1u << count; ++bits) {
    if (is_choice(bits)) choices[next++] = bits;
  }
  return choices;
}

}  // namespace dltrain::math
