#include "comm/transport/shm/stream.h"

#include <algorithm>
#include <cstring>

namespace dltrain::comm::shm {

namespace {

constexpr int parts = 4;  // of a ring: one is read while others are written

int64_t aligned(int64_t bytes) { return (bytes + cache_line - 1) / cache_line * cache_line; }

// How far one position is behind another one, of which another process may have written anything; at most `most`.
int64_t distance(int64_t from, int64_t to, int64_t most) {
  const auto distance = static_cast<int64_t>(static_cast<uint64_t>(to) - static_cast<uint64_t>(from));
  return std::clamp<int64_t>(distance, 0, most);
}

}  // namespace

int64_t Writer::room() const { return ring_.size() - distance(positions_->read.bytes.load(), own_, ring_.size()); }

int64_t Writer::write(const void* data, int64_t bytes) {
  const int64_t some = std::min({bytes, room(), ring_.size() / parts});
  if (some == 0) return 0;
  std::memcpy(ring_.at(own_), data, static_cast<size_t>(some));
  own_ += aligned(some);
  positions_->written.bytes.store(own_);
  return some;
}

int64_t Reader::filled() const { return distance(own_, positions_->written.bytes.load(), ring_.size()); }

void Reader::skip(int64_t bytes) {
  own_ += aligned(bytes);
  positions_->read.bytes.store(own_);
}

int64_t Reader::read(void* data, int64_t bytes) {
  const int64_t some = std::min({bytes, filled(), ring_.size() / parts});
  if (some == 0) return 0;
  std::memcpy(data, next(), static_cast<size_t>(some));
  skip(some);
  return some;
}

}  // namespace dltrain::comm::shm
