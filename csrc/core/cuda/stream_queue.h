#pragma once

#include <functional>
#include <mutex>

#include "core/event.h"
#include "core/execution_context.h"

namespace dltrain::cuda {

// The Queue on a CUDA device: tasks enqueue their work on a stream that is the queue's alone, in the order in which they are given. Events
// order it with the callers' streams, and no host thread waits.
class StreamQueue {
 public:
  explicit StreamQueue(const ExecutionContext& context) : context_(context) {}

  using Task = std::function<void(const ExecutionContext& context)>;

  // The task's work comes after what the caller's stream has been given, and before what it is given next.
  void run(const ExecutionContext& caller, const Task& task) { submit(caller, task).wait(caller); }

  // The same, but the caller's stream goes on at once: who needs the result waits for the event.
  Event submit(const ExecutionContext& caller, const Task& task);

  const ExecutionContext& context() const { return context_; }

 private:
  const ExecutionContext context_;
  std::mutex mutex_;
};

}  // namespace dltrain::cuda
