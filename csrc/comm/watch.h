#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/traffic.h"

namespace dltrain::comm {

// Looks after calls whose work has only been enqueued: gives up on the one that is not done at its deadline, or when the connections fail.
class Watch {
 public:
  struct Call {
    int device;
    std::vector<Stage> stages;  // in the order of the place's work
    Deadline deadline;
    std::function<void(const Stage& stage, const std::string& why)> give_up;
  };

  // error: what has become of the connections, asked from the watch's thread; empty while they are well.
  explicit Watch(std::function<std::string()> error) : error_(std::move(error)) {}
  ~Watch();

  void add(Call call);
  void drain();                                    // returns when all calls are done or given up
  bool is_over(std::chrono::milliseconds moment);  // whether they are, then or before

  // What the first call that is not done waits for; none where all are.
  Waiting waiting();

 private:
  void run();
  void forget(Call call);

  const std::function<std::string()> error_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> calls_;
  size_t passed_ = 0;  // stages of the first
  bool closed_ = false, failed_ = false;
  std::thread thread_;  // started by the first call
};

}  // namespace dltrain::comm
