#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/fault/failure.h"
#include "comm/fault/failure_detector.h"
#include "comm/fault/watchdog.h"
#include "comm/program/crossover.h"
#include "comm/run/invocation.h"
#include "comm/run/message_schedule.h"
#include "comm/transport/collectives.h"
#include "core/execution_context.h"
#include "core/memory.h"

namespace dltrain::comm {

// A call that cannot complete. The text names the rank waited for, the algorithm, the round and the deadline.
class CollectiveError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws std::invalid_argument naming what there is, and what fits what.
void check_names(Collective collective, const std::string& algorithm, const std::string& codec);

// How the message of a call that leaves one is laid out; nothing where its plan leaves none. "auto" goes by size.
Encoded encoded(const CallOptions& call, int64_t numel, int world_size);

// Runs plans over a transport, one at a time: whoever calls brings the order (a Queue).
class Executor {
 public:
  // global_ranks: what the ranks of the group are called in errors; by their place in the group where empty.
  explicit Executor(std::unique_ptr<Transport> transport, std::vector<int> global_ranks = {});
  ~Executor();  // what is enqueued and not done is aborted

  // A collective over the values, in place: on the CPU before it returns, on a CUDA device in the order of the stream. What is to hold no
  // result is undefined afterwards, but for the values of a reduce-scatter whose share goes elsewhere. After an error the messages of the
  // group are out of step, so every later call fails. On a device errors come after the call: its values are NaN then, and the next call
  // says why.
  void run(const ExecutionContext& context, const TypedPointer& values, int64_t numel, const CallOptions& options);

  // The halves of an all-reduce in two levels: in fp32, in place; shares by rank. By the backend itself where the transport has that, else
  // by plans.
  void reduce_scatter(const ExecutionContext& context, float* values, int64_t numel, const std::vector<Span>& shards, bool average,
                      std::chrono::milliseconds timeout);
  void all_gather(const ExecutionContext& context, float* values, int64_t numel, const std::vector<Span>& shards,
                  std::chrono::milliseconds timeout);

  // The backend's own; for transports that have it. In the second form the caller does it, and throws TransportError.
  void all_reduce_natively(const ExecutionContext& context, void* values, int64_t numel, ScalarType number, bool average,
                           std::chrono::milliseconds timeout);
  void all_reduce_natively(std::chrono::milliseconds timeout, const std::function<void()>& collective);

  // For a call that is none of the executor's: returns when the rank before this one is in the same.
  void handshake(Call call, std::chrono::milliseconds timeout);

  // From any thread: what is under way and all that comes later fails with `reason`.
  void abort(const std::string& reason);

  // What comes later fails with `reason`. Connections of a device that are well and have nothing under way close in good order, since a
  // peer may still be reading what this rank has sent last; else, and on the CPU, this is an abort.
  void end(const std::string& reason);

  // An abort where only the finding is known: the call that is under way, if there is one, will say the rest.
  void give_up(const std::string& finding);

  // Whom to ask why a wait has failed; before the first call. Without one the error says what this rank alone can know.
  void set_failure_detector(std::shared_ptr<FailureDetector> failure_detector) { failure_detector_ = std::move(failure_detector); }

  // What the call under way waits for, by the global ranks; nothing where there is none. From any thread.
  Waiting waiting();

  // Returns when what has been enqueued is done, or has failed.
  void drain() { watchdog_.drain(); }

  // What comes from now on fails with `reason`; what is under way goes on.
  void refuse(const std::string& reason) { failure_.set(reason); }

  // When nothing is under way any more: lets the peers know.
  void close() noexcept;

  std::string failure() const { return failure_.reason(); }  // why calls fail now; empty while they do not

  int rank() const { return transport_->rank(); }
  int world_size() const { return transport_->world_size(); }
  int64_t wire_bytes() const { return wire_bytes_; }  // sent by this rank

 private:
  bool enqueues() const { return transport_->grouping() != nullptr; }  // messages, on a device; else each is waited for
  Waiting in_the_world(Waiting waiting) const;
  int global(int rank) const { return global_ranks_.empty() ? rank : global_ranks_[rank]; }
  const Program& program(const CallOptions& call, const Codec& codec, int64_t numel, Result result);
  char* slots(const Invocation& work);
  Invocation invocation_of(const Program& program, const std::string& algorithm, const CallOptions& call, const ExecutionContext& context,
                           const TypedPointer& values, int64_t numel);
  void look_for_crossover(const ExecutionContext& context, std::chrono::milliseconds timeout);
  void check_open() const;
  void begin(const Call& call);
  std::string connection_error() const;  // empty while they are well
  void abort_connections();
  template <class Enqueue>
  void attend(const Invocation& work, Enqueue enqueue);
  void poison(const Invocation& work);
  void enqueue(Collective collective, const ExecutionContext& context, const TypedPointer& values, int64_t numel,
               std::chrono::milliseconds timeout, const std::function<void()>& enqueue_it);
  std::function<void(const Waiting*, const std::string&)> giving_up(const Invocation& work, Clock::time_point start);
  [[noreturn]] void fail(const Invocation& work, const Waiting& waiting, const std::exception& error, Clock::duration after);
  std::string find_culprit(const Waiting& waiting, const std::exception* error = nullptr);
  std::string describe_failure(const Invocation& work, const Waiting& waiting, const std::exception& error, Clock::duration after,
                               const std::string& finding) const;
  std::string describe(const std::string& called, const Waiting& waiting, int rounds, Clock::duration after, Clock::duration timeout,
                       const std::string& what) const;

  std::unique_ptr<Transport> transport_;
  std::unique_ptr<MessageSchedule> schedule_;
  std::vector<int> global_ranks_;
  Buffer slots_, receive_buffer_;
  Scratch scratch_;
  const Program handshake_;
  using Key = std::tuple<std::tuple<int, int, int64_t, int, Result, int>, Layout, std::vector<Span>>;
  std::map<Key, Program, std::less<>> programs_;
  std::atomic<int64_t> calls_ = 0, wire_bytes_ = 0;
  std::atomic<bool> under_way_ = false, broken_ = false;
  std::atomic<Collective> latest_ = Collective::all_reduce;  // of the calls
  std::optional<Crossover> crossover_;
  std::shared_ptr<FailureDetector> failure_detector_;
  std::mutex closing_;
  Failure failure_;
  Watchdog watchdog_{[this] { return connection_error(); }};  // the last: its thread uses the others
};

}  // namespace dltrain::comm
