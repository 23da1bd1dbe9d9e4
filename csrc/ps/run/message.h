#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"

namespace dltrain::ps {

enum class Kind : int32_t {
  push,      // worker to server: gradients of blocks
  accepted,  // server to worker: it has the push, and all of this worker's pushes before it
  pull,      // worker to server: one or more parts, each of which is answered for itself
  values,    // server to worker: what a part of the pull has read
  failed,    // server to worker: why it cannot have what it asked for, or, if that is no pull, why it can have nothing more
  question,  // worker to server: which workers does the pull wait for?
  reasons,   // the answer
  done,      // worker to server: it will ask for nothing more
  save,      // worker to server: it pushes nothing more until it has the state
  state,     // server to worker, when all workers have asked: all that the server has
  restore,   // worker to server, before any push: what a state has had
};

constexpr bool is_for_server(Kind kind) {
  switch (kind) {
    case Kind::push:
    case Kind::pull:
    case Kind::question:
    case Kind::done:
    case Kind::save:
    case Kind::restore: return true;
    default: return false;
  }
}

// What workers and servers send each other: a message of a mailbox that consists of these fields and of the encoded blocks. The data of a
// block begins at a multiple of `alignment`.
struct Message {
  static constexpr int64_t alignment = 64;
  static constexpr int64_t no_id = -1;  // it is answered only where it is refused

  Kind kind = Kind::push;
  int64_t id = 0;     // of the push or the pull that it is about; of a pull's first part; or no_id
  int64_t clock = 0;  // of the worker
  std::optional<int64_t> staleness = {};
  bool applied = false;    // pull: it waits until the worker's own pushes are applied
  float weight = 1.0f;     // push: with a grace, what the gradients are multiplied by
  bool skips = false;      // push: the gradients are not finite, and nothing follows; values: the last version of a block was skipped
  bool with_data = false;  // save: the worker wants the state, too, and not only to wait for the other workers
  bool differs = false;    // values: what is to be added to what the worker holds, not the values themselves
  std::vector<int32_t> blocks = {};   // by their number at the server
  std::vector<int64_t> numbers = {};  // pull: how many blocks each part has; values, state: their versions; reasons: workers' ranks
  std::vector<double> rates = {};     // push: the learning rate of each group
  std::string text = {};              // failed: why
};

inline int64_t aligned(int64_t bytes) { return (bytes + Message::alignment - 1) / Message::alignment * Message::alignment; }

// The fields as bytes, as many as a multiple of `alignment`; and back, where `data` is what follows. unpack throws std::invalid_argument
// where these are not the bytes of a message.
std::vector<std::byte> pack(const Message& message);
struct Unpacked {
  Message message;
  std::span<const std::byte> data;
};
Unpacked unpack(std::span<const std::byte> bytes);

// Sends a message to a rank: its fields, and data that stays where it is until `keep` is released.
struct Data {
  const std::byte* bytes = nullptr;
  int64_t count = 0;
  std::shared_ptr<const void> keep;
};
class Sender {
 public:
  virtual ~Sender() = default;
  // Returns false at the deadline, if the rank is still too far behind to take it.
  virtual bool send(int rank, const Message& message, Data data = {}, Deadline deadline = Deadline::max()) = 0;
  virtual std::shared_ptr<std::byte> allocate(int64_t bytes) = 0;
};

}  // namespace dltrain::ps
