#include "comm/transport/shm/stream.h"

#include <algorithm>
#include <cstring>

namespace dltrain::comm::shm {

namespace {

constexpr int parts = 4;  // of a ring: one is read while others are written

int64_t aligned(int64_t bytes) { return (bytes + cache_line - 1) / cache_line * cache_line; }

}  // namespace

int64_t Writer::room() const { return std::clamp<int64_t>(ring_.size() - (own_ - positions_->read.bytes.load()), 0, ring_.size()); }

int64_t Writer::write(const void* data, int64_t bytes) {
  const int64_t some = std::min({bytes, room(), ring_.size() / parts});
  if (some == 0) return 0;
  std::memcpy(ring_.at(own_), data, static_cast<size_t>(some));
  own_ += aligned(some);
  positions_->written.bytes.store(own_);
  return some;
}

int64_t Reader::filled() const { return std::clamp<int64_t>(positions_->written.bytes.load() - own_, 0, ring_.size()); }

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
