#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "comm/fault/diagnosis.h"
#include "comm/fault/watchdog.h"
#include "comm/run/invocation.h"
#include "comm/transport/transport.h"

namespace dltrain::comm {

// Decides when the messages of a call are sent over a transport, and runs the work between them; one call at a time.
class MessageSchedule {
 public:
  virtual ~MessageSchedule() = default;

  // Returns when all is done or, on a CUDA device, enqueued; there it returns the stages in the order of the work. Throws TransportError.
  virtual std::vector<Stage> run(const Invocation& work, Deadline deadline) = 0;

  virtual void abort() = 0;   // makes messages in progress and later ones fail; any thread may call it
  virtual void forget() = 0;  // drops the messages in progress after a failure

  // What the call in progress waits for. Any thread may call it.
  Waiting waiting() const;
  void wait_for(const Waiting& waiting);
  void wait_for(int peer, int round);

 private:
  mutable std::mutex mutex_;
  Waiting waiting_;
};

// Sends each message on its own as soon as possible, and posts receives one round ahead, so that they are ready when a peer sends.
std::unique_ptr<MessageSchedule> eager_schedule(Transport& transport);

// Posts the messages of half a tick together, each receive with the sends of its round.
std::unique_ptr<MessageSchedule> grouped_schedule(Transport& transport);

}  // namespace dltrain::comm
