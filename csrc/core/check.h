#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace dltrain {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Bad input: the text names the argument, what was expected and what came. Python sees a ValueError.
template <class... Parts>
void check(bool holds, const Parts&... parts) {
  if (!holds) throw std::invalid_argument(text(parts...));
}

}  // namespace dltrain
