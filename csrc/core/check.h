#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace dltrain {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Reports bad input. The text names the argument, what was expected and what was given. In Python it is a ValueError.
template <class... Parts>
void check(bool holds, const Parts&... parts) {
  if (!holds) throw std::invalid_argument(text(parts...));
}

// Reports a name that is not in the list of names.
[[noreturn]] inline void unknown_name(const char* argument, const std::vector<std::string>& names, const std::string& got) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  throw std::invalid_argument(text(argument, ": expected one of ", list, ", got '", got, "'"));
}

}  // namespace dltrain
