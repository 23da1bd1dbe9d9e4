#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <map>
#include <mutex>
#include <vector>

#include "core/clock.h"

namespace dltrain::bindings {

// Waits for Gloo's messages that also end when the connection breaks in the middle of one. Gloo itself wakes who waits for a message that
// has not begun; for one that is half way the wait would last until its deadline, though the peer is long dead.
//
// So a thread of the process looks from time to time at waits that last. It knows of a broken connection by a receive from the peer for
// which nothing is ever sent.
class GlooWaits {
 public:
  static constexpr int tag = 0x7fffffff;  // of that receive, and of nothing else

  explicit GlooWaits(c10::intrusive_ptr<c10d::Backend> backend);
  ~GlooWaits();
  GlooWaits(const GlooWaits&) = delete;
  GlooWaits& operator=(const GlooWaits&) = delete;

  // Of a message from the peer or to it: true when it is complete, false when it was aborted. Throws what Gloo throws, and TransportError.
  bool wait(int peer, c10d::Work& message, std::chrono::milliseconds timeout);

  // Whether no message that is not complete by now will ever be, with one of the peers.
  bool any_has_broken();

  void close() noexcept;  // lets go of the backend

 private:
  friend class Rounds;
  struct Wait {
    const int peer;
    c10d::Work& message;
    const Clock::time_point since = Clock::now();
    bool is_broken = false;
  };
  class Entry;

  void look();
  bool has_broken(int peer);

  std::mutex mutex_;  // guards what follows
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::map<int, c10::intrusive_ptr<c10d::Work>> probes_;  // by peer
  std::vector<Wait*> waits_;
};

}  // namespace dltrain::bindings
