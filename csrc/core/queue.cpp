#include "core/queue.h"

#include <future>
#include <memory>
#include <stdexcept>

namespace dltrain {

namespace {
constexpr const char* closed_text = "the queue is closed";
}

void Queue::run(const Task& task) {
  {
    std::unique_lock lock(mutex_);
    if (closed_) throw std::runtime_error(closed_text);
    if (busy_ || !tasks_.empty()) {
      lock.unlock();
      auto packaged = std::make_shared<std::packaged_task<void()>>(task);
      submit([packaged] { (*packaged)(); });
      packaged->get_future().get();
      return;
    }
    busy_ = true;
  }
  struct Leave {
    Queue* queue;
    ~Leave() {
      std::lock_guard lock(queue->mutex_);
      queue->busy_ = false;
      queue->changed_.notify_all();
    }
  } leave{this};
  task();
}

void Queue::submit(Task task) {
  std::lock_guard lock(mutex_);
  if (closed_) throw std::runtime_error(closed_text);
  tasks_.push_back(std::move(task));
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  changed_.notify_all();
}

void Queue::close() {
  std::thread worker;
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    worker.swap(worker_);
  }
  if (worker.joinable()) worker.join();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !busy_; });
}

void Queue::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !busy_ && (closed_ || !tasks_.empty()); });
    if (tasks_.empty()) return;
    {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      task();
    }
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace dltrain
