#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace dltrain {

// Calls an element function of for_each. One that is_indexed also gets the index of the element in its row.
template <class Element, class... Streams>
DLT_HD void apply(const Element& element, int64_t index, Streams&... streams) {
  if constexpr (requires { Element::is_indexed; }) {
    element(index, streams...);
  } else {
    element(streams...);
  }
}

}  // namespace dltrain
