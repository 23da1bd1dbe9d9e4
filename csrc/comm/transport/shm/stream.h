#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/cache_line.h"

namespace dltrain::comm::shm {

// Bytes from one process to another, in a ring of memory that they share, which is 0 at first. What is written together begins at a
// multiple of a cache line. Each end trusts only its own position: whatever another process writes, it stays within the ring.
class Stream {
 public:
  static constexpr int64_t alignment = 2 * cache_line;
  static constexpr int parts = 4;  // of a ring, so that one is read while others are written

  // The memory that a ring of `capacity` bytes needs, a multiple of `parts` times the alignment.
  static int64_t bytes(int64_t capacity) { return static_cast<int64_t>(sizeof(Positions)) + capacity; }

 protected:
  struct alignas(alignment) Position {  // two lines, because processors fetch them in pairs
    std::atomic<int64_t> bytes;
  };
  struct Positions {
    Position written, read;
  };

  Stream(std::byte* memory, int64_t capacity)
      : positions_(reinterpret_cast<Positions*>(memory)), ring_(memory + sizeof(Positions)), capacity_(capacity) {}

  Positions* positions_;
  std::byte* ring_;
  int64_t capacity_;
  int64_t own_ = 0;  // the position of this end

  void advance(Position& shared, int64_t bytes);
};

class Writer : public Stream {
 public:
  Writer(std::byte* memory, int64_t capacity) : Stream(memory, capacity) {}
  int64_t room() const;  // how many bytes can be written now
  // Writes at most so many bytes, those for which there is room. Returns how many. May be called again: the other end reads meanwhile.
  int64_t write(const void* data, int64_t bytes);
};

class Reader : public Stream {
 public:
  Reader(std::byte* memory, int64_t capacity) : Stream(memory, capacity) {}
  int64_t filled() const;  // how many bytes can be read now
  // Reads at most so many bytes, those that are there. Returns how many.
  int64_t read(void* data, int64_t bytes);
  void peek(void* data, int64_t bytes) const;  // so many have to be there, and stay
};

}  // namespace dltrain::comm::shm
