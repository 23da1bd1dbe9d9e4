#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace dltrain::comm {

// Which call of a group a message belongs to: the same on all ranks, if they agree.
struct Call {
  int64_t number = 0;  // of the group's calls
  int64_t numel = 0;
  int16_t algorithm = 0, codec = 0;  // a plan's number, and a place in codecs(); native: the backend's own all-reduce
  int32_t segments = 1;
  int32_t average = 0;
  int32_t root = 0;
  int64_t layout = 0;           // its digest, where there is one, or that of uneven shares
  std::array<char, 16> type{};  // of the elements, where it matters; 0 at its end
  static constexpr int16_t native = -1;
  bool operator==(const Call&) const = default;
};

// "call 7: all_reduce in int8 by ring over 1000 elements in 1 segment, averaged"
std::string describe(const Call& call);

}  // namespace dltrain::comm
