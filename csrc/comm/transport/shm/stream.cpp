#include "comm/transport/shm/stream.h"

#include <algorithm>
#include <cstring>

namespace dltrain::comm::shm {

namespace {

int64_t aligned(int64_t bytes) { return (bytes + cache_line - 1) / cache_line * cache_line; }

}  // namespace

void Stream::advance(Position& shared, int64_t bytes) {
  own_ += aligned(bytes);
  shared.bytes.store(own_);
}

int64_t Writer::room() const { return std::clamp<int64_t>(capacity_ - (own_ - positions_->read.bytes.load()), 0, capacity_); }

int64_t Writer::write(const void* data, int64_t bytes) {
  const int64_t some = std::min({bytes, room(), capacity_ / parts});
  if (some == 0) return 0;
  const int64_t at = own_ % capacity_, first = std::min(some, capacity_ - at);
  std::memcpy(ring_ + at, data, static_cast<size_t>(first));
  std::memcpy(ring_, static_cast<const std::byte*>(data) + first, static_cast<size_t>(some - first));
  advance(positions_->written, some);
  return some;
}

int64_t Reader::filled() const { return std::clamp<int64_t>(positions_->written.bytes.load() - own_, 0, capacity_); }

void Reader::peek(void* data, int64_t bytes) const {
  const int64_t at = own_ % capacity_, first = std::min(bytes, capacity_ - at);
  std::memcpy(data, ring_ + at, static_cast<size_t>(first));
  std::memcpy(static_cast<std::byte*>(data) + first, ring_, static_cast<size_t>(bytes - first));
}

int64_t Reader::read(void* data, int64_t bytes) {
  const int64_t some = std::min({bytes, filled(), capacity_ / parts});
  if (some == 0) return 0;
  peek(data, some);
  advance(positions_->read, some);
  return some;
}

}  // namespace dltrain::comm::shm
