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

// A message that will not come: the peer is gone or late, or the wait was aborted. The text is the transport's own.
class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A message of another call than this rank's came instead.
class Disagreement : public TransportError {
 public:
  using TransportError::TransportError;
};

// The peer has said that none will come any more.
class PeerClosed : public TransportError {
 public:
  using TransportError::TransportError;
};

// A posted send or receive. Dropping it gives its memory back, whether it has completed or not.
class Request {
 public:
  virtual ~Request() = default;
  // Returns when work that the place is given from now on finds the message complete. Throws TransportError.
  virtual void wait(Deadline deadline) = 0;
  virtual void abort() = 0;  // from any thread: wait throws
};

class Collectives;
class Framing;
class Grouping;
class Health;

// Carries bytes between the ranks of one group. Between two ranks messages of one tag arrive in the order in which they were posted. The
// data lies at the place, and a message takes its turn in the order of the context's work.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::unique_ptr<Request> send(const ExecutionContext& context, int peer, const void* data, int64_t bytes, int tag = 0) = 0;
  // The message may be shorter than `bytes`, never longer.
  virtual std::unique_ptr<Request> recv(const ExecutionContext& context, int peer, void* data, int64_t bytes, int tag = 0) = 0;
  // Nothing is sent or received from now on. Tells the peers, where they can be told, and ends their waits for this rank.
  virtual void close() noexcept {}

  // What a transport may do beside that; null where it does not.
  virtual Framing* framing() { return nullptr; }
  virtual Grouping* grouping() { return nullptr; }
  virtual Health* health() { return nullptr; }
  virtual Collectives* collectives() { return nullptr; }
};

// Says with each message which call it belongs to.
class Framing {
 public:
  virtual ~Framing() = default;
  virtual void begin(const Call& call) = 0;  // what is posted from now on belongs to it
  // What a peer said when it closed; empty where it has not.
  virtual std::string last_words(int peer) = 0;
};

// One of several that are posted together.
struct P2POp {
  bool sent;  // else received
  int peer;
  void* data;
  int64_t bytes;
};

// Of a transport whose messages that wait for each other must be posted together, each receive with the send that it is to match.
class Grouping {
 public:
  virtual ~Grouping() = default;
  // Posts all of them; the request is for all. They make progress together, so a rank's receives may be what others' sends wait for.
  virtual std::unique_ptr<Request> exchange(const ExecutionContext& context, const std::vector<P2POp>& ops) = 0;
};

// Of a transport whose messages are only enqueued. Both from any thread.
class Health {
 public:
  virtual ~Health() = default;
  virtual std::string error() = 0;    // what has become of the connections; empty while they are well
  virtual void abort() noexcept = 0;  // all that is under way
};

}  // namespace dltrain::comm
