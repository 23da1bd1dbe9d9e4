#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/transport/mailbox.h"

namespace dltrain::comm {

// What a mailbox has taken and not yet returned. From any thread.
class EventQueue {
 public:
  EventQueue(int world_size, int64_t limit);

  // What a message counts against a limit: also one without bytes takes memory.
  static int64_t cost(int64_t bytes) { return bytes + 256; }

  // Returns when there is room for another message of the peer, or the queue is closed.
  void wait_for_room(int peer);

  // Adds the event, or drops it where the queue is closed.
  void push(Mailbox::Event event);

  // Adds a message where there is room.
  Mailbox::SendResult offer(Mailbox::Event event);

  // What offer() would return of a message of this peer.
  Mailbox::SendResult would_take(int peer) const;

  std::optional<Mailbox::Event> pop(Deadline deadline);

  void close();
  bool is_closed() const;

 private:
  Mailbox::SendResult state(int peer) const;
  void add(Mailbox::Event event);

  const int64_t limit_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable arrived_, taken_;
  std::deque<Mailbox::Event> events_;
  std::vector<int64_t> held_;  // by peer: the cost of its messages
  bool closed_ = false;
};

}  // namespace dltrain::comm
