#pragma once

// An optimizer is a rule: a struct whose members are the hyper-parameters with their defaults, and which describes the state that it keeps
// and the numbers that it needs. Kernels, bindings, ops and the Python layer are generated from it:
//
//   static constexpr const char* name            the op is called name_
//   static constexpr auto hyper()                std::tuple of Hyper
//   static constexpr std::array states           of State: tensors of the parameter's shape
//   static constexpr std::array counters         optional, of Counter: numbers of a parameter; advance(float&...) counts a step
//   static constexpr int norms                   optional: how many norms of a tensor it needs
//   using Measure                                element of a norm: (its index as a type, parameter, gradient, state...) -> float
//   measure(PerTensor, grad_factor)              the Measure with its numbers
//   static constexpr Flag flag                   optional: marks tensors that are treated differently
//   template <unsigned states> using Element     what one step does to an element: (parameter&, gradient, state&...), where the bits of
//                                                states are the states that are present
//   needs(k)                                     optional: whether these hyper-parameters use the optional state k; default: if it is given
//   static constexpr bool compact                optional: whether a bf16 parameter may be rounded stochastically or extended by eight bits
//   at(PerTensor, lr, grad_factor)               the Element with its numbers; gradients are multiplied by grad_factor

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
  bool optional = false;     // whether some parameter groups do not have it
  float initial = 0.0f;      // the value before the first step
  bool nonnegative = false;  // whether it is never negative
  bool coded = false;        // whether it may be stored in a codec's format: Root8 if it is never negative, else Softsign8
};

struct Counter {
  const char* key;
  float initial = 0.0f;
};

struct Flag {
  const char* name = nullptr;
  bool by_default = false;
};

// The numbers of one tensor during a step.
struct PerTensor {
  static constexpr int most = 2;
  double counters[most] = {};  // already advanced
  double sums[most] = {};      // the sums of squares of the norms, if the tensor has the flag
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

// For each choice of optional states, the bits of all states that are then present, in ascending order.
template <class Rule>
constexpr auto choices_of() {
  struct Bits {
    unsigned all = 0, required = 0, optional = 0;  // optional: how many
  };
  constexpr Bits states = [] {
    Bits found;
    for (const State& state : Rule::states) {
      const unsigned bit = found.all + 1;
      found.all |= bit;
      found.required |= state.optional ? 0 : bit;
      found.optional += state.optional;
    }
    return found;
  }();
  std::array<unsigned, 1u << states.optional> choices{};
  for (unsigned bits = 0, next = 0; bits <= states.all; ++bits) {
    if ((bits & states.required) == states.required) choices[next++] = bits;
  }
  return choices;
}

// Whether what a step does to an element depends on the index of the element.
template <class Rule>
constexpr bool is_indexed() {
  using Element = typename Rule::template Element<choices_of<Rule>()[0]>;
  return requires { Element::is_indexed; };
}

template <class Rule>
constexpr bool is_compact() {
  return requires { requires Rule::compact; };
}

}  // namespace dltrain::math
