#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace dltrain {

// Runs tasks one at a time, in the order in which they were given, whichever threads give them.
class Queue {
 public:
  using Task = std::function<void()>;

  Queue() = default;
  ~Queue() { close(); }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Returns when the task has run; what it throws comes through. With nothing ahead of it, it runs in the calling thread: handing a small
  // message to another thread costs more than sending it.
  void run(const Task& task);

  // Returns at once; the worker runs the task, which must not throw.
  void submit(Task task);

  // Returns when all given tasks have run. Afterwards run and submit throw.
  void close();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool busy_ = false;
  bool closed_ = false;
  std::thread worker_;  // started by the first submit
};

}  // namespace dltrain
