#pragma once

#include <cstddef>
#include <cstring>
#include <span>

#include "comm/transport/mailbox.h"

namespace dltrain::comm {

inline int64_t count_bytes(Mailbox::Bytes header, std::span<const Mailbox::Bytes> pieces) {
  int64_t bytes = header.count;
  for (const Mailbox::Bytes& piece : pieces) bytes += piece.count;
  return bytes;
}

inline void gather(std::byte* to, Mailbox::Bytes header, std::span<const Mailbox::Bytes> pieces) {
  const auto append = [&](const Mailbox::Bytes& bytes) {
    if (bytes.count == 0) return;  // its address may be null
    std::memcpy(to, bytes.data, static_cast<size_t>(bytes.count));
    to += bytes.count;
  };
  append(header);
  for (const Mailbox::Bytes& piece : pieces) append(piece);
}

}  // namespace dltrain::comm
