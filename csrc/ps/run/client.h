#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/dtype.h"
#include "core/execution_context.h"
#include "core/memory.h"
#include "kernels/codec.h"
#include "ps/run/message.h"

namespace dltrain::ps {

// A push or a pull that is under way. From any thread.
class Ticket {
 public:
  // Returns whether it is complete, or false at the deadline. Throws std::runtime_error where it has failed.
  bool wait(Deadline deadline);
  // Of a complete save: the state of each server that has one.
  struct State {
    int server;
    std::vector<int64_t> versions;
    std::vector<std::byte> numbers;
  };
  const std::vector<State>& states() const { return states_; }
  bool is_done() const;
  void fail(const std::string& why);

  // Of a complete pull: the lowest and the highest version that its blocks had, and whether one of them was skipped.
  struct Versions {
    int64_t lowest = 0, highest = 0;
    bool skipped = false;
  };
  Versions versions() const;

 private:
  friend class Client;
  explicit Ticket(std::shared_ptr<const void> kept = {}) : kept_(std::move(kept)) {}
  void add_part();
  void finish_part(const Message* values);
  void add_state(State state);

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  int open_ = 0;
  bool failed_ = false, has_versions_ = false;
  std::string why_;
  Versions versions_;
  std::vector<State> states_;
  std::shared_ptr<const void> kept_;  // the memory into which a pull writes, until it is complete
};

// A worker of a store: it encodes gradients and sends them to the servers of their blocks, and decodes what it pulls. It has no thread:
// handle() and lose() are called by one thread, and all else by any.
class Client {
 public:
  struct Block {
    int server = 0;
    int at_server = 0;
    int64_t numel = 0;
    float* residual = nullptr;  // what encoding has lost of the gradient; may be null
    float* base = nullptr;      // where pulls are differences: what this worker holds
  };
  struct Options {
    std::vector<int> ranks;  // of the servers
    const Codec* push_codec = nullptr;
    const Codec* pull_codec = nullptr;
    bool together = false;  // the blocks of a server are pulled by one message, so that they are read at one time
  };
  struct Item {
    int block;
    TypedPointer elements;
  };

  Client(const ExecutionContext& context, Options options, std::vector<Block> blocks);

  // Sends factor times the gradients. When it returns, they may change. skips: they are not finite, and are not read. weight: with a grace,
  // what the server divides by, summed over the contributions of a version.
  std::shared_ptr<Ticket> push(int64_t clock, std::span<const Item> gradients, float factor, const std::vector<double>& rates, bool skips,
                               float weight, Sender& sender);
  // Writes into the items when the values come, and keeps their memory until then. applied: it waits until this worker's own pushes are.
  std::shared_ptr<Ticket> pull(int64_t clock, std::optional<int64_t> staleness, std::span<const Item> into,
                               std::shared_ptr<const void> kept, bool applied, Sender& sender);

  std::shared_ptr<Ticket> save(bool with_data, Sender& sender);

  // The memory of what encoding has lost, and of what this worker holds.
  int64_t bytes() const;

  void handle(int server, const Unpacked& message);
  // The server is lost: what it has not answered fails, and so do later calls that need it.
  void lose(int server, const std::string& why);
  void fail_all(const std::string& why);
  // The ranks of the servers that are lost.
  std::vector<int> lost();

  // Asks the servers what the ticket waits for, and returns a sentence for each that has not answered.
  std::string reasons(const std::shared_ptr<Ticket>& ticket, Deadline deadline, Sender& sender);

 private:
  using Bundle = std::vector<Item>;  // of one server, in one message
  struct Part {
    std::shared_ptr<Ticket> ticket = {};
    int server = 0;
    Bundle items = {};  // of a pull
    Kind answer = Kind::accepted;
    std::optional<std::vector<int64_t>> lacking = {};  // the ranks of the workers that the server waits for
  };
  using Lock = std::unique_lock<std::mutex>;

  std::vector<std::vector<Bundle>> bundles(std::span<const Item> items, bool together) const;
  int64_t open_part(const Lock& lock, const std::shared_ptr<Ticket>& ticket, Part part);
  Data encode(const Bundle& items, float factor, Message& message, Sender& sender) const;
  void write(const Part& part, const Unpacked& message);
  void give_up(const Lock& lock, int server, const std::string& why);
  std::string name_of(int server) const;

  const ExecutionContext context_;
  const Options options_;
  const std::vector<Block> blocks_;
  std::vector<std::vector<int>> by_server_;  // the block with each number at a server
  Buffer differences_;                       // of the thread that calls handle()

  std::mutex mutex_;  // guards what follows
  std::condition_variable answered_;
  std::map<int64_t, Part> parts_;
  std::vector<std::string> lost_;  // by server: why; empty if it is there
  int64_t next_id_ = 0;
};

}  // namespace dltrain::ps
