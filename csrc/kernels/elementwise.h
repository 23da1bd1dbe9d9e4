#pragma once

// Operations of for_each beside the steps of the optimizers. The last three are for a server that knows what each of its workers holds: the
// worker's shadow.

#include "core/host_device.h"
#include "core/tensor_list.h"
#include "math/delay.h"
#include "math/narrowing.h"

namespace dltrain {

// If the flag is set when it runs, sets all values to NaN, so that they are not mistaken for a result.
struct Poison {
  static constexpr int streams = 1;
  DLT_HD static constexpr bool writes(int) { return true; }
  struct Element {
    DLT_HD void operator()(float& value) const { value = float_of(0x7fc00000u); }
  };

  using Numbers = None;

  const int* flag;  // in memory of the values' device

  DLT_HD bool skip() const { return *flag == 0; }
  DLT_HD Element at(const None&) const { return {}; }
  static bool same(const None&, const None&) { return true; }
};

// to <- from: encodes or decodes, if one of them is in a compact format.
struct Copy {
  static constexpr int streams = 2;
  DLT_HD static constexpr bool writes(int k) { return k == 0; }
  static constexpr bool may_be_compact(int) { return true; }
  struct Element {
    DLT_HD void operator()(float& to, float from) const { to = from; }
  };
  using Numbers = None;

  DLT_HD bool skip() const { return false; }
  DLT_HD Element at(const None&) const { return {}; }
  static bool same(const None&, const None&) { return true; }
};

// The extension of `element`, a bfloat16 and no more, <- what extends it to the master.
struct Extend {
  static constexpr int streams = 2;
  DLT_HD static constexpr bool writes(int k) { return k == 0; }
  static constexpr bool may_be_compact(int k) { return k == 0; }
  struct Element {
    DLT_HD void operator()(float& element, float master) const { element = math::extending(element, master); }
  };
  using Numbers = None;

  DLT_HD bool skip() const { return false; }
  DLT_HD Element at(const None&) const { return {}; }
  static bool same(const None&, const None&) { return true; }
};

// difference <- value - shadow
struct Subtract {
  static constexpr int streams = 3;
  DLT_HD static constexpr bool writes(int k) { return k == 0; }
  struct Element {
    DLT_HD void operator()(float& difference, float value, float shadow) const { difference = value - shadow; }
  };
  using Numbers = None;

  DLT_HD bool skip() const { return false; }
  DLT_HD Element at(const None&) const { return {}; }
  static bool same(const None&, const None&) { return true; }
};

// held <- held + difference, by the worker and for its shadow alike, so that both have the same bits.
struct Accumulate {
  static constexpr int streams = 2;
  DLT_HD static constexpr bool writes(int k) { return k == 0; }
  struct Element {
    DLT_HD void operator()(float& held, float difference) const { held += difference; }
  };
  using Numbers = None;

  DLT_HD bool skip() const { return false; }
  DLT_HD Element at(const None&) const { return {}; }
  static bool same(const None&, const None&) { return true; }
};

// The gradient of a worker is moved from the parameter that the worker holds to the present one.
struct Compensate {
  static constexpr int streams = 3;
  DLT_HD static constexpr bool writes(int k) { return k == 0; }
  struct Element {
    float lambda;
    DLT_HD void operator()(float& grad, float value, float shadow) const { grad = math::compensated(grad, value, shadow, lambda); }
  };
  using Numbers = None;

  float lambda;

  DLT_HD bool skip() const { return lambda == 0.0f; }
  DLT_HD Element at(const None&) const { return {lambda}; }
  static bool same(const None&, const None&) { return true; }
};

}  // namespace dltrain
