#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/fault/adaptive_timeout.h"
#include "comm/fault/control_channel.h"

namespace dltrain::comm {

// Finds the culprit when a call fails, and makes all ranks fail at once and for the same reason. A thread answers the questions of the
// other ranks, whatever this rank does.
//
//   a wait fails  --->  question to all  --->  answers: for whom each waits  --->  diagnosis to all, which they pass on
//                                                                                     |
//                                      calls in progress are aborted, later ones fail <
//
// A failed call returns when the other ranks have sent the diagnosis, too. This process may then end without being taken for the culprit.
class FailureDetector {
 public:
  // Functions on the calls of this rank. The detector's thread calls them, or the thread of a failed call.
  struct Calls {
    std::function<Waiting()> waiting;                         // returns what the call in progress waits for
    std::function<void(const std::string& finding)> give_up;  // makes all calls fail, now and later
  };

  // global_ranks: the global rank of each rank of the channel; if empty, they are the same.
  FailureDetector(std::unique_ptr<ControlChannel> channel, std::vector<int> global_ranks, Calls calls,
                  const AdaptiveTimeout& answer_timeout);
  ~FailureDetector() { close(); }

  // To be called when a call of the group begins.
  void begin() { ++begun_; }

  // For a call whose wait has failed, or was aborted because of a diagnosis. Returns the text of the diagnosis; empty after close().
  std::string explain(const Waiting& waiting);

  // For a call whose cause of failure is known: a message of a different call arrived, or this rank's own part has failed. Other ranks then
  // need not search for a culprit.
  std::string declare(Diagnosis::Cause cause, const Waiting& waiting);

  // The global rank that the diagnosis holds responsible; nothing without one. Any thread may call it.
  std::optional<int> culprit();

  // Does not wait for other ranks, which see that this rank has left. Any thread but the detector's own may call it.
  void close();

 private:
  struct Peer {
    Known known;
    bool has_diagnosis = false;
  };
  class Busy;
  using Lock = std::unique_lock<std::mutex>;

  void run();
  void handle(int peer, const ControlMessage& message);
  void inquire(Lock& lock, const Waiting& waiting);
  void adopt(Lock& lock, const Diagnosis& diagnosis);
  std::string wait_for_others(Lock& lock);
  void ask(int peer);
  AdaptiveTimeout::Seconds pause() const;
  void send(int peer, const ControlMessage& message);
  bool all_have_answered() const;
  bool all_have(const Diagnosis& diagnosis) const;
  int global(int peer) const { return global_ranks_.empty() ? peer : global_ranks_[peer]; }

  const std::unique_ptr<ControlChannel> channel_;
  const std::vector<int> global_ranks_;
  const Calls calls_;
  std::atomic<int64_t> begun_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  AdaptiveTimeout answer_timeout_;
  std::optional<Diagnosis> diagnosis_;
  bool inquiring_ = false, inquired_ = false, closed_ = false;
  int busy_ = 0;  // calls of explain and declare in progress
  std::thread thread_;
};

}  // namespace dltrain::comm
