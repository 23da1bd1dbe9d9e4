#include "comm/transport/header.h"

#include "comm/transport/transport.h"
#include "core/check.h"

namespace dltrain::comm {

std::string difference(const Header& header, const Call& expected) {
  const bool has_closed = header.bytes == Header::closed;
  if (has_closed && header.call.number == 0) return "it has closed its end";
  const std::string theirs = text(has_closed ? "it has closed its end; its latest is " : "it is in ", describe(header.call));
  return header.call == expected ? theirs : text(theirs, "; this rank is in ", describe(expected));
}

void check_header(const Header& header, const Call& expected, int64_t bytes) {
  const bool agrees = header.call == expected;
  if (header.bytes == Header::closed && (agrees || header.call.number != expected.number)) throw PeerClosed(difference(header, expected));
  if (!agrees) throw Disagreement(difference(header, expected));
  if (header.bytes != bytes) throw Disagreement(text("it sends ", header.bytes, " bytes, this rank expects ", bytes));
}

}  // namespace dltrain::comm
