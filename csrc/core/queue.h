#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

namespace dltrain {

// Runs tasks one at a time, in the order in which they were given, whichever threads give them.
class Queue {
 public:
  using Task = std::function<void()>;

  Queue();
  ~Queue() { close(); }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Returns when the task has run; what it throws comes through. With nothing ahead of it, it runs in the calling thread: handing a small
  // message to another thread costs more than sending it.
  void run(const Task& task);

  // Returns at once; the worker runs the task, which must not throw.
  void submit(Task task);

  // Afterwards run and submit throw. Returns when all given tasks have run; called by one of them it returns at once, and the worker ends
  // after the last.
  void close();

  // Whether a task of this queue, run by its worker, is what calls.
  bool in_worker() const { return std::this_thread::get_id() == worker_id_; }

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;  // shared with the worker, which may outlive the queue
  std::thread worker_;            // started by the first submit
  std::atomic<std::thread::id> worker_id_;
};

}  // namespace dltrain
