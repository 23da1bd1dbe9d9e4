#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "comm/fault/diagnosis.h"
#include "comm/fault/watchdog.h"
#include "comm/run/invocation.h"
#include "comm/transport/transport.h"

namespace dltrain::comm {

// How the messages of a call go out over a transport, and what is done between them; one call at a time.
class MessageSchedule {
 public:
  virtual ~MessageSchedule() = default;

  // Returns when all is done or, on a CUDA device, enqueued: then the stages, in the order of the context's work. Throws TransportError.
  virtual std::vector<Stage> run(const Invocation& work, Deadline deadline) = 0;

  virtual void abort() = 0;   // from any thread: what is under way fails, and what is posted from then on
  virtual void forget() = 0;  // what was under way, after a failure

  // What the call under way waits for; any thread may ask.
  Waiting waiting() const;
  void wait_for(const Waiting& waiting);
  void wait_for(int peer, int round);

 private:
  mutable std::mutex mutex_;
  Waiting waiting_;
};

// Each message by itself, as soon as it can go, and receives a round ahead, so that a sender finds them.
std::unique_ptr<MessageSchedule> eager_schedule(Transport& transport);

// All messages of a tick together, each receive beside its round's sends.
std::unique_ptr<MessageSchedule> grouped_schedule(Transport& transport);

}  // namespace dltrain::comm
