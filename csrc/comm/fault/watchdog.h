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

// A part of a call that has only been enqueued. `passed` is passed when the messages that it waits for have arrived.
struct Stage {
  Event passed;
  Waiting waiting;
};

// Watches calls whose work is only enqueued. It gives up a call that is not done at its deadline, or when the connections fail, also while
// the call is being enqueued, because that may have to wait for peers.
class Watchdog {
 public:
  struct Call {
    int device;
    Deadline deadline;
    std::function<void(const Waiting* waiting, const std::string& why)> give_up;  // waiting: null until all is enqueued
    int64_t number = 0;
    std::optional<std::vector<Stage>> stages = {};  // in the order of the context's work; none until all is enqueued
  };

  // error: returns the error of the connections; empty if there is none. The watchdog's thread calls it.
  explicit Watchdog(std::function<std::string()> error) : error_(std::move(error)) {}
  ~Watchdog();

  int64_t begin(Call call);
  void enqueued(int64_t number, std::vector<Stage> stages);  // no stages: the call has failed, or its events never pass
  void drain();                                              // returns when all calls are done or given up
  bool is_over(std::chrono::milliseconds timeout);           // whether all calls are done or given up within the timeout

  // What the first call that is not done waits for; nothing if all calls are done.
  Waiting waiting();

 private:
  void run();
  void forget(Call call);

  const std::function<std::string()> error_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> calls_;
  int64_t begun_ = 0;
  size_t passed_ = 0;  // stages of the first call that have been passed
  bool closed_ = false, failed_ = false;
  std::thread thread_;  // started by the first call
};

}  // namespace dltrain::comm
