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

#include "comm/collectives.h"
#include "comm/program.h"
#include "comm/transport.h"
#include "comm/watch.h"
#include "core/memory.h"
#include "core/place.h"

namespace dltrain::comm {

// An all-reduce that cannot complete. The text names the rank waited for, the algorithm, the round and the deadline.
class AllReduceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws std::invalid_argument naming what there is, and what fits what.
void check_names(const std::string& algorithm, const std::string& codec);

struct AllReduce {
  std::string algorithm = "auto";
  std::string codec = "raw";
  bool average = false;
  int segments = 0;  // 0: chosen by size
  std::chrono::milliseconds timeout = std::chrono::minutes(30);

  Elements residual;        // as many as there are values; what encoding loses stays there, and is added the next time
  bool stochastic = false;  // rounding
  uint64_t seed = 0;
  int64_t first = 0;             // the number of the first element: each draws its own random numbers
  std::optional<uint32_t> step;  // of the stream of random numbers; the number of the call where there is none
};

struct Stats {
  int64_t calls = 0;
  int64_t wire_bytes = 0;  // sent by this rank
};

// Runs plans over a transport, one at a time: whoever calls brings the order (a Queue).
class Executor {
 public:
  // global_ranks: what the ranks of the group are called in errors; by their place in the group where empty.
  explicit Executor(std::unique_ptr<Transport> transport, std::vector<int> global_ranks = {})
      : transport_(std::move(transport)), global_ranks_(std::move(global_ranks)), meeting_(meeting(rank(), world_size())) {}

  // Sums (or averages) values over the ranks, in place: on the CPU before it returns, on a CUDA device in the order of the stream. After an
  // error the messages of the group are out of step, so every later call fails. On a device errors come after the call: its values are NaN
  // then, and the next call says why.
  void all_reduce(const Place& place, const Elements& values, int64_t numel, const AllReduce& call);

  // The halves of an all-reduce in fp32. Afterwards this rank holds the sum (or average) of its share(); and where each holds its own, all
  // hold all. By the backend itself where the transport has that, else by plans.
  void reduce_scatter(const Place& place, float* values, int64_t numel, bool average, std::chrono::milliseconds timeout);
  void all_gather(const Place& place, float* values, int64_t numel, std::chrono::milliseconds timeout);

  // The backend's own; for transports that have it.
  void all_reduce_natively(const Place& place, void* values, int64_t numel, Number number, bool average, std::chrono::milliseconds timeout);

  // For a call that is none of the executor's: returns when the rank before this one is in the same.
  void meet(Call call, std::chrono::milliseconds timeout);

  // From any thread: what is under way and all that comes later fails with `reason`.
  void abort(const std::string& reason);

  // Returns when what has been enqueued is done, or has failed.
  void drain() { watch_.drain(); }

  // When nothing is under way any more: lets the peers know.
  void close() noexcept;

  std::string failure() const;  // why calls fail now; empty while they do not

  int rank() const { return transport_->rank(); }
  int global_rank() const { return global(rank()); }
  int world_size() const { return transport_->world_size(); }
  Stats stats() const { return {calls_, wire_bytes_}; }

 private:
  struct Posted {
    Transfer transfer;
    std::unique_ptr<Request> request;
  };
  struct InFlight {                  // of one segment
    std::vector<Posted> now, ahead;  // of the round under way; the next round's receives
  };
  struct Waiting {
    std::vector<int> peers;  // for one of them
    int round = 0;
  };
  struct Group {  // of messages under way
    std::unique_ptr<Request> request;
    Waiting waiting;
  };
  static constexpr int halves = 2;

  // One call, and where its bytes lie.
  struct Work {
    const Program& program;
    const std::string& algorithm;
    const AllReduce& call;
    const Codec& codec;
    Place place;
    Elements values;
    int64_t numel = 0;
    char *slots = nullptr, *inbox = nullptr;
    uint32_t step = 0;

    char* at(const Location& location) const { return (location.room == Location::Room::slots ? slots : inbox) + location.offset; }
  };

  int global(int rank) const { return global_ranks_.empty() ? rank : global_ranks_[rank]; }
  const Program& program(const AllReduce& call, const Codec& codec, int64_t numel, bool in_place);
  void run(const Work& work);
  void run_one_by_one(const Work& work, Deadline deadline);
  void run_in_groups(const Work& work, Clock::time_point start);
  void enqueue(const char* name, const Place& place, const Elements& values, int64_t numel, std::chrono::milliseconds timeout,
               const std::function<void()>& collective);
  std::vector<Span> shares(int64_t numel) const;
  std::vector<int> everybody_else() const;
  void watch_over(const Work& work, std::vector<Watch::Stage> stages, Clock::time_point start);
  void spoil_if_failed(const Work& work);
  [[noreturn]] void fail(const Work& work, const std::exception& error, Clock::duration after);
  std::string failure_of(const std::string& algorithm, const Waiting& waiting, int rounds, Clock::duration after, Clock::duration timeout,
                         const std::string& what) const;
  void set_failure(const std::string& reason);
  void post(const Work& work, const Transfer& transfer, bool send);
  void post_group(const Work& work, Group& group);
  void wait_for(const Transfer& transfer);
  void complete(InFlight& segment, Deadline deadline);
  void complete(Group& group, Deadline deadline);
  void sum(const Work& work, const SumStep& step);
  void decode(const Work& work, const DecodeStep& step);

  std::unique_ptr<Transport> transport_;
  std::vector<int> global_ranks_;
  Buffer slots_, inbox_;
  std::vector<const uint8_t*> received_;
  const Program meeting_;
  std::map<std::tuple<int, int, int64_t, int, bool>, Program> programs_;
  std::atomic<int64_t> calls_ = 0, wire_bytes_ = 0;

  Waiting waiting_;                         // for what was posted or waited for last
  std::vector<std::vector<Transfer>> due_;  // in groups, by segment: the receives of its next round
  std::vector<Transfer> sends_, receives_;  // of the next group

  mutable std::mutex mutex_;  // guards what follows
  std::vector<InFlight> in_flight_;
  Group groups_[halves];
  std::string failure_;
  Memory failed_;  // an int that devices read: whether there is a failure

  Watch watch_{[this] { return transport_->error(); }};  // the last: its thread uses the others
};

}  // namespace dltrain::comm
