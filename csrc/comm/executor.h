#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/program.h"
#include "comm/transport.h"
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
  // error the messages of the group are out of step, so every later call fails.
  void all_reduce(const Place& place, const Elements& values, int64_t numel, const AllReduce& call);

  // For a call that is none of the executor's: returns when the rank before this one is in the same.
  void meet(Call call, std::chrono::milliseconds timeout);

  // From any thread: what is under way and all that comes later fails with `reason`.
  void abort(const std::string& reason);

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

  // One call, and where its bytes lie.
  struct Work {
    const Program& program;
    const std::string& algorithm;
    const AllReduce& call;
    const Codec& codec;
    Place place;
    Elements values;
    char *slots = nullptr, *inbox = nullptr;
    uint32_t step = 0;

    char* at(const Location& location) const { return (location.room == Location::Room::slots ? slots : inbox) + location.offset; }
  };

  int global(int rank) const { return global_ranks_.empty() ? rank : global_ranks_[rank]; }
  const Program& program(const AllReduce& call, const Codec& codec, int64_t numel, bool in_place);
  void run(const Work& work);
  [[noreturn]] void fail(const Work& work, const std::exception& error, Clock::duration after);
  void post(const Work& work, const Transfer& transfer, bool send);
  void complete(InFlight& segment, Deadline deadline);
  void sum(const Work& work, const SumStep& step);
  void decode(const Work& work, const DecodeStep& step);

  std::unique_ptr<Transport> transport_;
  std::vector<int> global_ranks_;
  Buffer slots_, inbox_;
  std::vector<const uint8_t*> received_;
  const Program meeting_;
  std::map<std::tuple<int, int, int64_t, int, bool>, Program> programs_;
  std::atomic<int64_t> calls_ = 0, wire_bytes_ = 0;

  Transfer waiting_{};  // the latest transfer posted or waited for

  mutable std::mutex mutex_;  // guards what follows
  std::vector<InFlight> in_flight_;
  std::string failure_;
};

}  // namespace dltrain::comm
