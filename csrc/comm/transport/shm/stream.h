#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "comm/transport/shm/memory.h"
#include "core/cache_line.h"

namespace dltrain::comm::shm {

// How many bytes have been written to a stream, and read from it, by the processes at its ends; 0 at first.
struct Positions {
  struct alignas(2 * cache_line) Position {  // two lines, because processors fetch them in pairs
    std::atomic<int64_t> bytes;
  };
  Position written, read;
};

// An end of a stream of bytes from one process to another, through a ring. What is written together begins at a multiple of a cache line.
// Each end trusts only its own position: whatever another process writes, it stays within the ring.
class Stream {
 protected:
  Stream(Positions& positions, Ring ring) : positions_(&positions), ring_(std::move(ring)) {}

  Positions* positions_;
  Ring ring_;
  int64_t own_ = 0;  // the position of this end
};

class Writer : public Stream {
 public:
  Writer(Positions& positions, Ring ring) : Stream(positions, std::move(ring)) {}
  int64_t room() const;  // how many bytes can be written now
  // Writes at most so many bytes, those for which there is room. Returns how many. May be called again: the other end reads meanwhile.
  int64_t write(const void* data, int64_t bytes);
};

class Reader : public Stream {
 public:
  Reader(Positions& positions, Ring ring) : Stream(positions, std::move(ring)) {}
  int64_t filled() const;  // how many bytes can be read now
  int64_t size() const { return ring_.size(); }
  const std::byte* next() const { return ring_.at(own_); }  // they lie in one piece
  void skip(int64_t bytes);                                 // so many have been read
  // Reads at most so many bytes, those that are there. Returns how many.
  int64_t read(void* data, int64_t bytes);
};

}  // namespace dltrain::comm::shm
