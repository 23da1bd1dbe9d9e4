#include "comm/watch.h"

#include <utility>

#include "core/cuda/runtime.h"

namespace dltrain::comm {

Watch::~Watch() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  for (Call& call : calls_) forget(std::move(call));
}

// After a fault to destroy events may take for ever, so they stay.
void Watch::forget(Call call) {
  static std::mutex guards;
  static auto& of_faults = *new std::vector<Call>;
  const std::lock_guard lock(guards);
  if (failed_) of_faults.push_back(std::move(call));
}

void Watch::add(Call call) {
  if (call.stages.empty()) return;
  std::lock_guard lock(mutex_);
  calls_.push_back(std::move(call));
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  changed_.notify_all();
}

void Watch::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return closed_ || calls_.empty(); });
}

bool Watch::is_over(std::chrono::milliseconds moment) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, moment, [this] { return calls_.empty(); });
}

Waiting Watch::waiting() {
  std::lock_guard lock(mutex_);
  return calls_.empty() ? Waiting() : calls_.front().stages[passed_].waiting;
}

void Watch::run() {
  constexpr auto interval = std::chrono::milliseconds(1);
  bool begun = false;
  std::unique_lock lock(mutex_);
  while (!closed_) {
    if (calls_.empty()) {
      changed_.wait(lock, [this] { return closed_ || !calls_.empty(); });
      continue;
    }
    Call& call = calls_.front();  // adding others does not move it
    lock.unlock();
    size_t done = 0;
    std::string why;
    try {
      if constexpr (built_with_cuda) {
        if (!begun) cuda::stay_out_of_captures(call.device);
        begun = true;
      }
      while (done < call.stages.size() && call.stages[done].passed.passed()) ++done;
      if (done < call.stages.size()) why = error_();
    } catch (const std::exception& error) {
      why = error.what();  // the device's own
    }
    if (why.empty() && Clock::now() > call.deadline) why = "nothing came";
    const bool over = done == call.stages.size();
    if (!over && !why.empty()) call.give_up(call.stages[done], why);
    lock.lock();
    failed_ = failed_ || !why.empty();
    passed_ = over || !why.empty() ? 0 : done;
    if (over || !why.empty()) {
      Call ended = std::move(call);
      calls_.pop_front();
      changed_.notify_all();
      lock.unlock();  // as long as its events take to go, nobody is kept
      forget(std::move(ended));
      lock.lock();
    } else {
      changed_.wait_for(lock, interval, [this] { return closed_; });
    }
  }
}

}  // namespace dltrain::comm
