#pragma once

#include <optional>

#include "comm/fault/diagnosis.h"

namespace dltrain::comm {

// What the lookouts of a group tell each other.
struct ControlMessage {
  enum class Kind : int32_t { question, answer, diagnosis };
  Kind kind = Kind::question;
  RankState state;      // of an answer
  Diagnosis diagnosis;  // of a verdict
  int64_t asked = 0;    // of a question and its answer: when, by the asker's clock
};

// Carries notices between the ranks of one group, beside the connections that their data goes over. From any thread.
class ControlChannel {
 public:
  virtual ~ControlChannel() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // Returns at once, whatever the peer does. False where its end is closed; true promises nothing.
  virtual bool send(int peer, const ControlMessage& notice) noexcept = 0;

  struct Received {
    int from;
    ControlMessage notice;
  };
  // The next notice, from whomever it comes; nothing once this end is closed.
  virtual std::optional<Received> receive() = 0;

  virtual void close() noexcept = 0;
};

}  // namespace dltrain::comm
