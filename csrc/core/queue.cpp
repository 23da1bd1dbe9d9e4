#include "core/queue.h"

#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>

namespace dltrain {

struct Queue::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool busy = false;
  bool closed = false;

  void check_open() const {
    if (closed) throw Closed();
  }
};

Queue::Queue() : state_(std::make_shared<State>()) {}

void Queue::run(const Task& task) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.check_open();
  if (state.busy || !state.tasks.empty()) {
    lock.unlock();
    auto packaged = std::make_shared<std::packaged_task<void()>>(task);
    submit([packaged] { (*packaged)(); });
    packaged->get_future().get();
    return;
  }
  state.busy = true;
  lock.unlock();
  struct Leave {
    State& state;
    ~Leave() {
      std::lock_guard lock(state.mutex);
      state.busy = false;
      state.changed.notify_all();
    }
  } leave{state};
  task();
}

void Queue::submit(Task task) {
  std::lock_guard lock(state_->mutex);
  state_->check_open();
  state_->tasks.push_back(std::move(task));
  if (!worker_.joinable()) {
    worker_ = std::thread([state = state_] { work(state); });
    worker_id_ = worker_.get_id();
  }
  state_->changed.notify_all();
}

void Queue::close() {
  std::unique_lock lock(state_->mutex);
  state_->closed = true;
  state_->changed.notify_all();
  std::thread worker = std::move(worker_);
  lock.unlock();
  if (in_worker()) {
    if (worker.joinable()) worker.detach();
    return;
  }
  if (worker.joinable()) worker.join();
  lock.lock();
  state_->changed.wait(lock, [this] { return !state_->busy; });
}

void Queue::work(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&] { return !state->busy && (state->closed || !state->tasks.empty()); });
    if (state->tasks.empty()) return;
    {
      Task task = std::move(state->tasks.front());
      state->tasks.pop_front();
      state->busy = true;
      lock.unlock();
      task();
    }
    lock.lock();
    state->busy = false;
    state->changed.notify_all();
  }
}

}  // namespace dltrain
