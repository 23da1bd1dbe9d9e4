#include "comm/fault/watchdog.h"

#include <algorithm>
#include <utility>

#include "core/cuda/runtime.h"

namespace dltrain::comm {

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  for (Call& call : calls_) forget(std::move(call));
}

// After a fault, destroying events may block for ever, so they are never destroyed.
void Watchdog::forget(Call call) {
  static std::mutex guards;
  static auto& never_destroyed = *new std::vector<Call>;
  const std::lock_guard lock(guards);
  if (failed_) never_destroyed.push_back(std::move(call));
}

int64_t Watchdog::begin(Call call) {
  std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  call.number = ++begun_;
  calls_.push_back(std::move(call));
  changed_.notify_all();
  return begun_;
}

void Watchdog::enqueued(int64_t number, std::vector<Stage> stages) {
  std::lock_guard lock(mutex_);
  const auto call = std::find_if(calls_.begin(), calls_.end(), [number](const Call& each) { return each.number == number; });
  if (call == calls_.end()) return;  // it was given up
  call->stages = std::move(stages);
  changed_.notify_all();
}

void Watchdog::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return closed_ || calls_.empty(); });
}

bool Watchdog::is_over(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return calls_.empty(); });
}

Waiting Watchdog::waiting() {
  std::lock_guard lock(mutex_);
  if (calls_.empty()) return {};
  const auto& stages = calls_.front().stages;
  return stages && !stages->empty() ? (*stages)[passed_].waiting : Waiting();
}

void Watchdog::run() {
  constexpr auto interval = std::chrono::milliseconds(1);
  bool begun = false;
  std::unique_lock lock(mutex_);
  while (!closed_) {
    if (calls_.empty()) {
      changed_.wait(lock, [this] { return closed_ || !calls_.empty(); });
      continue;
    }
    Call& call = calls_.front();                                       // begin() does not move it
    const auto* const stages = call.stages ? &*call.stages : nullptr;  // they are set only once
    lock.unlock();
    size_t done = 0;
    bool over = false;
    std::string why;
    try {
      if constexpr (built_with_cuda) {
        if (!begun) cuda::stay_out_of_captures(call.device);
        begun = true;
      }
      while (stages && done < stages->size() && (*stages)[done].passed.passed()) ++done;
      over = stages && done == stages->size();
      if (!over) why = error_();
    } catch (const std::exception& error) {
      why = error.what();  // an error of the device
    }
    if (!over && why.empty() && Clock::now() > call.deadline) why = "nothing came";
    if (!over && !why.empty()) call.give_up(stages ? &(*stages)[done].waiting : nullptr, why);
    lock.lock();
    failed_ = failed_ || !why.empty();
    passed_ = over || !why.empty() ? 0 : done;
    if (over || !why.empty()) {
      Call ended = std::move(call);
      calls_.pop_front();
      changed_.notify_all();
      lock.unlock();  // destroying its events may take long, and blocks no other thread
      forget(std::move(ended));
      lock.lock();
    } else {
      changed_.wait_for(lock, interval, [this] { return closed_; });
    }
  }
}

}  // namespace dltrain::comm
