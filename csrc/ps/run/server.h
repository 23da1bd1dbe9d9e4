#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/clock.h"
#include "core/execution_context.h"
#include "core/memory.h"
#include "kernels/codec.h"
#include "ps/core/core.h"
#include "ps/run/graces.h"
#include "ps/run/message.h"
#include "ps/run/updater.h"

namespace dltrain::ps {

// One message that a server has handled, in a record of their order, or the end of a grace that has made a version. What a server does
// depends on nothing else.
struct Handled {
  enum class What : int32_t { push, pull, leave, grace, applied_pull };
  What what = What::push;
  int32_t worker = -1;       // grace: none
  int64_t clock = 0;         // grace: the version
  int32_t first_block = -1;  // grace: the block
  bool operator==(const Handled&) const = default;
};
Handled described(const Message& message, int worker);

// A server of a store: it adds up the gradients that workers push, updates its blocks, and sends them to the workers that pull. Its Core
// decides when. It has no thread: whoever calls it has one.
class Server {
 public:
  struct Block {
    float* value = nullptr;
    int64_t numel = 0;
    int group = 0;  // whose updater and learning rate it has
    int slot = 0;   // in that updater
  };
  struct Options {
    std::vector<int> ranks;  // of the workers
    int quorum = Core::all;
    int64_t window = 64;
    const Codec* push_codec = nullptr;
    const Codec* pull_codec = nullptr;
    float delay_compensation = 0.0f;  // lambda
    bool lockstep = false;            // all workers pull each version once, so they hold the same, and get the same message
    bool records = false;
    Clock::duration grace{};  // how long a quorum waits for more contributions
  };

  Server(const ExecutionContext& context, Options options, std::vector<Block> blocks, std::vector<std::unique_ptr<Updater>> updaters);

  // A message of a worker. The memory of its data is released when its gradients are applied.
  void handle(int worker, const Unpacked& message, const std::shared_ptr<const void>& memory, Sender& sender);
  void leave(int worker, const std::string& why, Sender& sender);
  // The grace of this version of a block is over; it is ignored if the version is made already.
  void end_grace(int block, int64_t version, Sender& sender);
  // Ends all graces that are over by now. Returns whether there were any.
  bool end_graces(Deadline now, Sender& sender);
  // When the next grace is over.
  Deadline next_grace_end();

  const std::vector<Handled>& record() const { return record_; }
  bool is_lockstep() const { return options_.lockstep; }
  bool has_grace() const { return options_.grace > Clock::duration(); }
  // How many pushes of each worker are in all blocks.
  std::vector<int64_t> applied() const;
  // Of all blocks, in their order.
  std::vector<int64_t> versions() const;
  // Writes the state_numel() numbers of all blocks: of each its values, its states and its counters.
  int64_t state_numel();
  void copy_state(float* to);
  // The memory of the values, the state, the pushes that wait, and of what workers hold.
  int64_t bytes();

 private:
  // A contribution that is not yet applied.
  struct Held {
    std::shared_ptr<const void> memory;
    const uint8_t* data = nullptr;
    int64_t bytes = 0;
    std::shared_ptr<const std::vector<double>> rates;
    bool skips = false;
    float weight = 1.0f;
  };
  struct Waiting {
    int worker = -1;
    int64_t id = 0;
    std::vector<int> blocks;
  };
  // What a worker holds, or all of them in lockstep: for each block its version, or -1, and the values.
  struct Shadow {
    std::vector<int64_t> versions;
    Memory values;
  };
  // A message that all workers get.
  struct Reply {
    std::vector<int> blocks = {};
    std::vector<int64_t> versions = {}, bases = {};  // of the blocks; of what the workers hold, if the message is a difference
    Message message = {};
    Data data = {};
  };

  void check_push(const Unpacked& message) const;
  void check_pull(const Message& message) const;
  void push(int worker, const Unpacked& message, const std::shared_ptr<const void>& memory, Sender& sender);
  void pull(int worker, const Message& message, Sender& sender);
  void save(int worker, const Message& message, Sender& sender);
  void send_states(Sender& sender);
  void restore(const Unpacked& message);
  template <class Visit>
  void for_each_number_of(int block, Visit&& visit);
  void perform(Sender& sender);
  void elapse(int block, int64_t version);
  const Graces::Grace* next_grace();
  const std::vector<double>& rates_of(const Action& action) const;
  double divisor_of(const Action& action) const;
  void apply();
  const float* gradient_of(const Action& action, float* sum, std::vector<Sum>& sums, std::vector<std::vector<const uint8_t*>>& lists);
  void answer(const Waiting& pull, Sender& sender);
  Reply reply(int worker, const std::vector<int>& blocks, Sender& sender);
  void write_difference(const std::vector<int>& blocks, Shadow& shadow, uint8_t* to);
  void write_values(const std::vector<int>& blocks, float* const* from, uint8_t* to) const;
  float* shadow_of(Shadow& shadow, int block) const;
  Shadow& shadow_for(int worker);
  bool has_shadows() const { return options_.pull_codec->is_lossy() || options_.delay_compensation != 0.0f; }
  std::string lost(int worker) const;

  const ExecutionContext context_;
  const Options options_;
  const std::vector<Block> blocks_;
  std::vector<int64_t> firsts_;  // of each block, in memory that has all of them
  std::vector<std::unique_ptr<Updater>> updaters_;
  Core core_;
  std::vector<Action> actions_;
  std::vector<Action> applied_;  // that are applied together
  Graces graces_;
  std::vector<bool> in_applied_;
  std::vector<int64_t> skipped_;  // of each block: the last version that was skipped, or -1
  std::unordered_map<int64_t, Held> held_;
  std::unordered_map<int64_t, Waiting> waiting_;
  std::unordered_map<int, Reply> replies_;           // in lockstep, by the first block
  std::vector<Shadow> shadows_;                      // by worker, or one in lockstep
  std::vector<std::vector<int64_t>> versions_held_;  // by worker, in lockstep: of each block
  std::vector<std::optional<Message>> saving_;       // by worker: what it has asked for
  std::vector<std::string> lost_;                    // by worker: why it has left; empty if it has not
  Buffer sums_, differences_;
  std::vector<Handled> record_;
  int64_t next_id_ = 0;
};

}  // namespace dltrain::ps
