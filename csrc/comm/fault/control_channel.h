#pragma once

#include <optional>

#include "comm/fault/diagnosis.h"

namespace dltrain::comm {

// A message between the failure detectors of a group.
struct ControlMessage {
  enum class Kind : int32_t { question, answer, diagnosis };
  Kind kind = Kind::question;
  RankState state;      // of an answer
  Diagnosis diagnosis;  // of a diagnosis
  int64_t asked = 0;    // of a question and its answer: the time of the question, by the clock of the rank that asks
};

// Carries control messages between the ranks of one group, apart from the connections of their data. Any thread may call it.
class ControlChannel {
 public:
  virtual ~ControlChannel() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // Returns at once, whatever the peer does. False: the peer's end is closed. True does not guarantee that the message arrives.
  virtual bool send(int peer, const ControlMessage& message) noexcept = 0;

  struct Received {
    int from;
    ControlMessage notice;
  };
  // Waits for the next message of any peer. Returns nothing after this end has been closed.
  virtual std::optional<Received> receive() = 0;

  virtual void close() noexcept = 0;
};

}  // namespace dltrain::comm
