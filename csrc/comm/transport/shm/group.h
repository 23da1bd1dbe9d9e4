#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "comm/transport/call.h"
#include "comm/transport/shm/bell.h"
#include "comm/transport/shm/memory.h"
#include "comm/transport/shm/stream.h"

namespace dltrain::comm::shm {

// The memory of a group: what the others know of each rank, and a stream from each rank to each other one.
//
//   | Label | Member 0 | Member 1 | ... | Positions 0 to 1 | Positions 0 to 2 | ... | ring 0 to 1 | ring 0 to 2 | ...
//
// It has a bounded size, so longer messages pass through it in pieces.
class Group {
 public:
  struct Member {
    Bell bell;
    alignas(2 * cache_line) std::atomic<bool> has_closed;  // its end; set after `latest`
    Call latest;
  };

  // New memory, made by the first rank. Throws TransportError.
  explicit Group(int world_size);
  // The memory of the first rank. Throws TransportError if there is none, or if it is another one.
  Group(const std::string& address, int world_size);

  // What the other ranks need. A part of it is random: the number of a process may mean another process in a container.
  std::string address() const;
  // No other process can open it any more, nor this one make another end of a stream.
  void close() { memory_.close(); }

  int world_size() const { return world_size_; }
  Member& member(int rank) const;
  Writer writer(int from, int to) const { return {positions(from, to), ring(from, to)}; }
  Reader reader(int from, int to) const { return {positions(from, to), ring(from, to)}; }

 private:
  struct Label;
  Label& label() const;
  Positions& positions(int from, int to) const;
  Ring ring(int from, int to) const;

  const int world_size_;
  Memory memory_;
};

}  // namespace dltrain::comm::shm
