#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>

namespace dltrain {

// Runs tasks one at a time, in the order in which they were submitted, from any thread.
class Queue {
 public:
  using Task = std::function<void()>;

  // Thrown instead of running or taking a task.
  class Closed : public std::runtime_error {
   public:
    Closed() : std::runtime_error("the queue is closed") {}
  };

  Queue();
  ~Queue() { close(); }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Returns when the task has run, and rethrows what it throws. If the queue is idle, the task runs in the calling thread: passing a small
  // message to another thread costs more than sending it.
  void run(const Task& task);

  // Returns at once; the worker runs the task, which must not throw.
  void submit(Task task);

  // After this call run and submit throw Closed. Returns when all submitted tasks have run; if one of them calls it, it returns at once,
  // and the worker ends after the last task.
  void close();

  // Whether the caller is the worker, which runs a task of this queue.
  bool in_worker() const { return std::this_thread::get_id() == worker_id_; }

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;  // shared with the worker, which may outlive the queue
  std::thread worker_;            // started by the first submit
  std::atomic<std::thread::id> worker_id_;
};

}  // namespace dltrain
