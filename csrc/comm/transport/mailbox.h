#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/clock.h"

namespace dltrain::comm {

// Messages of any length between the ranks of a group, received from whichever peer sends next. There is one session with each peer. When a
// session ends, receive() reports it as an event; the sessions with the other peers go on. What follows from it is up to the user.
//
// Messages from one rank to another arrive in the order in which they were sent. A rank may send to itself. All methods may be called from
// any thread.
//
// Memory is bounded by a limit for each peer and direction, which one message may exceed:
// - A rank stops taking messages from a peer while receive() has not yet returned `limit` bytes of what it has taken from that peer.
// - send() refuses a message while the peer has not taken `limit` bytes of what was sent before. The caller decides whether to drop the
//   message, to wait for an answer, or to give up the peer. A caller that waits has to call receive() meanwhile, because the peer's
//   acknowledgments come behind the peer's messages.
class Mailbox {
 public:
  static constexpr int64_t default_limit = 64 << 20;

  struct Bytes {
    const void* data = nullptr;
    int64_t count = 0;
  };

  enum class SendResult {
    taken,   // the peer receives the message, unless the session ends before
    full,    // the message was not taken: the peer is behind by `limit` bytes
    closed,  // the message was not taken: the session has ended, or this mailbox is closed
  };

  struct Event {
    enum class Kind {
      message,
      closed,  // the peer has closed its mailbox, and all that it sent was received
      broken,  // the connection is lost; what the peer sent last may be missing
    };
    Kind kind = Kind::message;
    int from = -1;
    std::shared_ptr<std::byte> data;  // of a message: on a cache-line border; the memory is used again when it is released
    int64_t bytes = 0;
    std::string reason;  // of a broken session
  };

  // Dropping a mailbox without close() looks to the peers as if this process had been killed.
  virtual ~Mailbox() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // Sends the header followed by the pieces, as one message. Returns at once, whatever the peer does. The header is copied. With `keep`,
  // the pieces are sent from where they are: they must not change until `keep` is released, which happens when the peer has the message or
  // the session has ended, in any thread. Without it, they are copied too.
  virtual SendResult send(int peer, Bytes header, std::span<const Bytes> pieces = {}, std::shared_ptr<const void> keep = {}) = 0;

  // Memory in which a message can be prepared. It serves as `keep` of the piece that it holds, and is used again afterwards.
  virtual std::shared_ptr<std::byte> allocate(int64_t bytes) = 0;

  // The next event: a message or, once for each peer and behind all its messages, the end of its session. Nothing when the deadline has
  // passed, or once this mailbox is closed.
  virtual std::optional<Event> receive(Deadline deadline = Deadline::max()) = 0;

  // Ends all sessions in good order: returns when the peers have received all that was sent to them, or after `grace`. A peer that has not
  // received all by then sees a broken session. What has arrived and was not yet returned by receive() is dropped.
  virtual void close(std::chrono::milliseconds grace = std::chrono::milliseconds(1000)) = 0;
  virtual bool is_closed() const = 0;
};

}  // namespace dltrain::comm
