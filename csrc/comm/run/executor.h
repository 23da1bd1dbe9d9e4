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

// A call cannot complete. The text names the rank that was waited for, the algorithm, the round and the deadline.
class CollectiveError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws std::invalid_argument if there is no such name, or if the algorithm does not fit the codec. The text lists the names that fit.
void check_names(Collective collective, const std::string& algorithm, const std::string& codec);

// The layout of the message that is the result of a call; empty if the plan leaves no message. "auto" selects by size only.
Encoded encoded(const CallOptions& call, int64_t numel, int world_size);

// Runs plans over a transport, one call at a time. The caller keeps the calls in order (with a Queue).
class Executor {
 public:
  // global_ranks: the global rank of each rank of the group, for errors; if empty, they are the same.
  explicit Executor(std::unique_ptr<Transport> transport, std::vector<int> global_ranks = {});
  ~Executor();  // aborts work that is enqueued and not done

  // Runs a collective on the values, in place: on the CPU before it returns, on a CUDA device in the order of the stream. Values that are
  // not a part of the result are undefined afterwards, except those of a reduce-scatter whose shard is written elsewhere. After an error
  // the messages of the group are out of step, so every later call fails. On a device errors occur after the call: its values become NaN,
  // and the next call throws the reason.
  void run(const ExecutionContext& context, const TypedPointer& values, int64_t numel, const CallOptions& options);

  // The halves of an all-reduce in two levels, on fp32 values in place; shards[r] belongs to rank r. If the transport has Collectives, the
  // backend executes them, otherwise plans do.
  void reduce_scatter(const ExecutionContext& context, float* values, int64_t numel, const std::vector<Span>& shards, bool average,
                      std::chrono::milliseconds timeout);
  void all_gather(const ExecutionContext& context, float* values, int64_t numel, const std::vector<Span>& shards,
                  std::chrono::milliseconds timeout);

  // The backend's own all-reduce, for transports that have one. In the second form `collective` executes it, and throws TransportError.
  void all_reduce_natively(const ExecutionContext& context, void* values, int64_t numel, ScalarType type, bool average,
                           std::chrono::milliseconds timeout);
  void all_reduce_natively(std::chrono::milliseconds timeout, const std::function<void()>& collective);

  // For a call that the executor does not run: returns when the previous rank is in the same call.
  void handshake(Call call, std::chrono::milliseconds timeout);

  // Makes the call in progress and all later calls fail with `reason`. Any thread may call it.
  void abort(const std::string& reason);

  // Makes later calls fail with `reason`. Connections of a device without an error and without work in progress are closed, not aborted,
  // because a peer may still be reading the last message of this rank. Otherwise, and on the CPU, this is an abort.
  void end(const std::string& reason);

  // An abort with a provisional reason, the detector's finding. The call in progress, if there is one, sets the complete reason.
  void give_up(const std::string& finding);

  // Sets the detector that explains why a wait has failed, before the first call. Without one, errors say only what this rank can detect.
  void set_failure_detector(std::shared_ptr<FailureDetector> failure_detector) { failure_detector_ = std::move(failure_detector); }

  // What the call in progress waits for, with global ranks; nothing if there is none. Any thread may call it.
  Waiting waiting();

  // Returns when all enqueued work is done or has failed, and no end of this executor can spoil its results any more.
  void drain() {
    watchdog_.drain();
    failure_.drain();
  }

  // Makes later calls fail with `reason`. Calls in progress continue.
  void refuse(const std::string& reason) { failure_.set(reason); }

  // Notifies the peers. To be called when no call is in progress.
  void close() noexcept;

  std::string failure() const { return failure_.reason(); }  // why calls fail; empty while they do not

  int rank() const { return transport_->rank(); }
  int world_size() const { return transport_->world_size(); }
  int64_t wire_bytes() const { return wire_bytes_; }  // sent by this rank
  int64_t segment_bytes() const { return transport_->segment_bytes(); }

 private:
  bool enqueues() const { return transport_->grouping() != nullptr; }  // on a device; otherwise messages are waited for
  Waiting with_global_ranks(Waiting waiting) const;
  int global(int rank) const { return global_ranks_.empty() ? rank : global_ranks_[rank]; }
  const Program& program(const CallOptions& call, const Codec& codec, int64_t numel, Result result);
  char* slots(const Invocation& work);
  Invocation invocation_of(const Program& program, const std::string& algorithm, const CallOptions& call, const ExecutionContext& context,
                           const TypedPointer& values, int64_t numel);
  void look_for_crossover(const ExecutionContext& context, std::chrono::milliseconds timeout);
  void check_open() const;
  void begin(const Call& call);
  std::string connection_error() const;  // empty if there is none
  void abort_connections();
  template <class Enqueue>
  void supervise(const Invocation& work, Enqueue enqueue);
  void poison(const Invocation& work);
  void enqueue(Collective collective, const ExecutionContext& context, const TypedPointer& values, int64_t numel,
               std::chrono::milliseconds timeout, const std::function<void()>& enqueue_it);
  std::function<void(const Waiting*, const std::string&)> giving_up(const Invocation& work, Clock::time_point start);
  [[noreturn]] void fail(const Invocation& work, const Waiting& waiting, const std::exception& error, Clock::duration after);
  std::string find_culprit(const Waiting& waiting, const std::exception* error = nullptr);
  std::string describe_failure(const Invocation& work, const Waiting& waiting, const std::exception& error, Clock::duration after,
                               const std::string& finding) const;
  std::string describe(const std::string& call_name, const Waiting& waiting, int rounds, Clock::duration after, Clock::duration timeout,
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
  std::atomic<Collective> latest_ = Collective::all_reduce;  // the collective of the latest call
  std::optional<Crossover> crossover_;
  std::shared_ptr<FailureDetector> failure_detector_;
  std::mutex closing_;
  Failure failure_;
  Watchdog watchdog_{[this] { return connection_error(); }};  // the last member: its thread uses the others
};

}  // namespace dltrain::comm
