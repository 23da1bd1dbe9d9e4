#pragma once

#include <compare>
#include <cstdint>

namespace dltrain {

struct Span {  // of elements
  int64_t first = 0, count = 0;
  auto operator<=>(const Span&) const = default;
};

}  // namespace dltrain
