#pragma once

#include <functional>
#include <mutex>

#include "core/event.h"
#include "core/execution_context.h"

namespace dltrain::cuda {

// The Queue on a CUDA device: tasks enqueue their work on a stream that only the queue uses, in the order in which they are submitted.
// Events order this work with the callers' streams, and no host thread waits.
class StreamQueue {
 public:
  explicit StreamQueue(const ExecutionContext& context) : context_(context) {}

  using Task = std::function<void(const ExecutionContext& context)>;

  // The task's work runs after the work already on the caller's stream, and before the work that the caller's stream is given next.
  void run(const ExecutionContext& caller, const Task& task) { submit(caller, task).wait(caller); }

  // The same, but the caller's stream does not wait: a stream that needs the result must wait for the event.
  Event submit(const ExecutionContext& caller, const Task& task);

  const ExecutionContext& context() const { return context_; }

 private:
  const ExecutionContext context_;
  std::mutex mutex_;
};

}  // namespace dltrain::cuda
