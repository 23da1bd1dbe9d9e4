#include "core/cuda/stream_queue.h"

namespace dltrain::cuda {

Event StreamQueue::submit(const ExecutionContext& caller, const Task& task) {
  const std::lock_guard lock(mutex_);
  Event::record(caller).wait(context_);
  try {
    task(context_);
  } catch (...) {
    Event::record(context_).wait(caller);  // work that was enqueued before the error may still run
    throw;
  }
  return Event::record(context_);
}

}  // namespace dltrain::cuda
