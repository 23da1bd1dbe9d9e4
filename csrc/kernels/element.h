#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace dltrain {

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

}  // namespace dltrain
