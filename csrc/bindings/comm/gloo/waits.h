#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <map>
#include <mutex>
#include <vector>

#include "core/clock.h"

namespace dltrain::bindings {

// Waits for Gloo's messages, which also end when the connection breaks in the middle of a message. Gloo itself ends the wait only if the
// message has not begun. If it has begun, the wait would last until its deadline, although the peer is dead.
//
// So a thread of the process checks waits that take long, from time to time. It detects a broken connection by a receive from the peer that
// is never matched by a send.
class GlooWaits {
 public:
  static constexpr int tag = 0x7fffffff;  // of that receive, and of nothing else

  // What becomes of the backend's other connections when one breaks in the middle of a message. Closing them all tells the other peers at
  // once; leaving them takes another interval to see that the message is not complete.
  enum class Others { close, leave };

  explicit GlooWaits(c10::intrusive_ptr<c10d::Backend> backend, Others others = Others::close);
  ~GlooWaits();
  GlooWaits(const GlooWaits&) = delete;
  GlooWaits& operator=(const GlooWaits&) = delete;

  // Waits for a message from or to the peer. Returns false if it was aborted. Throws Gloo's exceptions, and TransportError.
  bool wait(int peer, c10d::Work& message, std::chrono::milliseconds timeout);

  // Whether the connection to one of the peers is broken, so that its incomplete messages will never complete.
  bool any_has_broken();

  void close() noexcept;  // releases the backend

 private:
  friend class Rounds;
  struct Wait {
    const int peer;
    c10d::Work& message;
    const Clock::time_point since = Clock::now();
    bool is_broken = false;
  };
  class Entry;

  bool is_broken(const Wait& wait);
  void look();
  bool has_broken(int peer);

  const Others others_;
  std::mutex mutex_;  // guards the members below
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::map<int, c10::intrusive_ptr<c10d::Work>> probes_;  // by peer
  std::vector<Wait*> waits_;
};

}  // namespace dltrain::bindings
