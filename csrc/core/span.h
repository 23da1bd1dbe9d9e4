#pragma once

#include <compare>
#include <cstdint>

namespace dltrain {

struct Span {
  int64_t first = 0, count = 0;  // in elements
  auto operator<=>(const Span&) const = default;
};

}  // namespace dltrain
