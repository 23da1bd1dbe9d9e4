#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace dltrain::comm {

// Identifies the call to which a message belongs. It is the same on all ranks of the group if they agree.
struct Call {
  int64_t number = 0;  // counts the calls of the group
  int64_t numel = 0;
  int16_t algorithm = 0, codec = 0;  // the number of the plan, or native; the index in codecs()
  int32_t segments = 1;
  int32_t average = 0;
  int32_t root = 0;
  int64_t layout = 0;                    // the digest of the layout or of uneven shards; 0: there are none
  std::array<char, 16> type{};           // the element type as a zero-terminated string; empty: not compared
  static constexpr int16_t native = -1;  // the backend's own all-reduce
  bool operator==(const Call&) const = default;
};

// "call 7: all_reduce in int8 by ring over 1000 elements in 1 segment, averaged"
std::string describe(const Call& call);

}  // namespace dltrain::comm
