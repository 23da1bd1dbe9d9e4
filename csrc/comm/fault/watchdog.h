#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/fault/diagnosis.h"
#include "core/clock.h"
#include "core/event.h"

namespace dltrain::comm {

// Of a call that has only been enqueued: passed when what was waited for has come.
struct Stage {
  Event passed;
  Waiting waiting;
};

// Looks after calls whose work is only enqueued: gives up on the one that is not done at its deadline, or when the connections fail. Also
// while it is being enqueued, since that may have to wait for peers.
class Watchdog {
 public:
  struct Call {
    int device;
    Deadline deadline;
    std::function<void(const Waiting* waiting, const std::string& why)> give_up;  // waiting: null before all is enqueued
    int64_t number = 0;
    std::optional<std::vector<Stage>> stages = {};  // in the order of the context's work, when all is enqueued
  };

  // error: what has become of the connections, asked from the watch's thread; empty while they are well.
  explicit Watchdog(std::function<std::string()> error) : error_(std::move(error)) {}
  ~Watchdog();

  int64_t begin(Call call);
  void enqueued(int64_t number, std::vector<Stage> stages);  // or nothing, of a call that has failed, or whose events never pass
  void drain();                                              // returns when all calls are done or given up
  bool is_over(std::chrono::milliseconds moment);            // whether they are, then or before

  // What the first call that is not done waits for; none where all are.
  Waiting waiting();

 private:
  void run();
  void forget(Call call);

  const std::function<std::string()> error_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> calls_;
  int64_t begun_ = 0;
  size_t passed_ = 0;  // stages of the first
  bool closed_ = false, failed_ = false;
  std::thread thread_;  // started by the first call
};

}  // namespace dltrain::comm
