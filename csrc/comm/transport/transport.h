#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/transport/call.h"
#include "core/clock.h"
#include "core/execution_context.h"

namespace dltrain::comm {

// A message will not arrive: the peer has left or is late, or the wait was aborted. The text is written by the transport.
class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A message of a different call arrived instead of one of this rank's call.
class Disagreement : public TransportError {
 public:
  using TransportError::TransportError;
};

// The peer has closed its end, so no more messages of it will arrive.
class PeerClosed : public TransportError {
 public:
  using TransportError::TransportError;
};

// A posted send or receive. Destroying it releases its resources, whether it has completed or not.
class Request {
 public:
  virtual ~Request() = default;
  // After this, later work of the execution context runs when the message is complete. Throws TransportError.
  virtual void wait(Deadline deadline) = 0;
  virtual void abort() = 0;  // makes wait throw; any thread may call it
  // Where a message lies that was received in place, as long as the request exists and nothing else is waited for; null: where it was to
  // be.
  virtual const void* place() const { return nullptr; }
};

class Collectives;
class Framing;
class Grouping;
class Health;

// Carries bytes between the ranks of one group. Between two ranks, messages of one tag arrive in the order in which they were posted. The
// data is in memory of the execution context, and a message takes its turn in the order of the context's work.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::unique_ptr<Request> send(const ExecutionContext& context, int peer, const void* data, int64_t bytes, int tag = 0) = 0;
  // The message may be shorter than `bytes`, but not longer.
  virtual std::unique_ptr<Request> recv(const ExecutionContext& context, int peer, void* data, int64_t bytes, int tag = 0) = 0;
  // Like recv, for a message that is used at once: it need not leave the place where it has arrived.
  virtual std::unique_ptr<Request> recv_in_place(const ExecutionContext& context, int peer, void* data, int64_t bytes) {
    return recv(context, peer, data, bytes);
  }
  // Ends sending and receiving. Notifies the peers if the transport can do so, and ends their waits for this rank.
  virtual void close() noexcept {}

  // The size of segments that suits it; 0: that of a network.
  virtual int64_t segment_bytes() const { return 0; }

  // Optional features; null if the transport does not have them.
  virtual Framing* framing() { return nullptr; }
  virtual Grouping* grouping() { return nullptr; }
  virtual Health* health() { return nullptr; }
  virtual Collectives* collectives() { return nullptr; }
};

// Sends with each message the call to which it belongs.
class Framing {
 public:
  virtual ~Framing() = default;
  virtual void begin(const Call& call) = 0;  // messages that are posted after this belong to the call
  // Describes a header from the peer that is not of this call, or says that the peer has closed its end; empty if there is none.
  virtual std::string last_words(int peer) = 0;
};

// One of several messages that are posted together.
struct P2POp {
  bool sent;  // false: received
  int peer;
  void* data;
  int64_t bytes;
};

// The feature of a transport whose messages must be posted together if they wait for each other, each receive with its matching send.
class Grouping {
 public:
  virtual ~Grouping() = default;
  // Posts all ops with one request. They make progress together, so the sends of other ranks may wait for the receives of this one.
  virtual std::unique_ptr<Request> exchange(const ExecutionContext& context, const std::vector<P2POp>& ops) = 0;
};

// The feature of a transport that only enqueues messages. Any thread may call these functions.
class Health {
 public:
  virtual ~Health() = default;
  virtual std::string error() = 0;    // the error of the connections; empty if there is none
  virtual void abort() noexcept = 0;  // aborts all messages in progress
};

}  // namespace dltrain::comm
