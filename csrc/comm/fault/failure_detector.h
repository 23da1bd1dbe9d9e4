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

// Finds out, when a call fails, which rank is to blame, and has all ranks fail at once and for the same reason. A thread answers the
// others' questions, whatever this rank is busy with.
//
//   a wait fails  --->  question to all  --->  answers: whom each waits for  --->  verdict to all, who pass it on
//                                                                                     |
//                                        calls under way are aborted, later ones fail <
//
// A failed call returns when the others are known to know: this process may then end, and is not taken for the culprit.
class FailureDetector {
 public:
  // What it has to do with the rank's calls: from its thread, or that of a call that has failed.
  struct Calls {
    std::function<Waiting()> waiting;                         // of the call under way
    std::function<void(const std::string& finding)> give_up;  // all of them, now and later
  };

  // global_ranks: what the ranks of the channel are called; by their place in it where empty.
  FailureDetector(std::unique_ptr<ControlChannel> channel, std::vector<int> global_ranks, Calls calls,
                  const AdaptiveTimeout& answer_timeout);
  ~FailureDetector() { close(); }

  // A call of the group begins.
  void begin() { ++begun_; }

  // For a call whose wait has failed, or was aborted for a verdict: what to say of it. Empty once closed.
  std::string explain(const Waiting& waiting);

  // For a call whose failure has a reason that is known: it met another call, or this rank's own part cannot be done. The others need not
  // look for a culprit.
  std::string declare(Diagnosis::Cause cause, const Waiting& waiting);

  // At once, from any thread but its own. The other ranks see that this one has left.
  void close();

 private:
  struct Peer {
    Known known;
    bool knows = false;  // the verdict
  };
  class Busy;
  using Lock = std::unique_lock<std::mutex>;

  void run();
  void hear(int peer, const ControlMessage& notice);
  void inquire(Lock& lock, const Waiting& waiting);
  void learn(Lock& lock, const Diagnosis& diagnosis);
  std::string settle(Lock& lock);
  void ask(int peer);
  AdaptiveTimeout::Seconds pause() const;
  void tell(int peer, const ControlMessage& notice);
  bool all_have_answered() const;
  bool all_know(const Diagnosis& diagnosis) const;
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
  int busy_ = 0;  // calls that are being explained
  std::thread thread_;
};

}  // namespace dltrain::comm
