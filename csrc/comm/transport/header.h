#pragma once

#include <cstdint>
#include <string>

#include "comm/transport/call.h"
#include "core/cache_line.h"

namespace dltrain::comm {

// What travels in front of a message.
struct Header {
  static constexpr int64_t closed = -1;
  Call call;
  int64_t bytes;  // of the message; `closed`: the sender has closed its end
};

static_assert(sizeof(Header) == cache_line);  // so a message behind it begins a cache line, too

// Describes a header that is not the expected one.
std::string difference(const Header& header, const Call& expected);

// Throws PeerClosed or Disagreement if the header is not that of a message of this call, with so many bytes.
void check_header(const Header& header, const Call& expected, int64_t bytes);

}  // namespace dltrain::comm
