#include "core/cuda/stream_queue.h"

namespace dltrain::cuda {

Event StreamQueue::submit(const Place& caller, const Task& task) {
  const std::lock_guard lock(mutex_);
  Event::record(caller).wait(place_);
  try {
    task(place_);
  } catch (...) {
    Event::record(place_).wait(caller);  // what it enqueued before may still be under way
    throw;
  }
  return Event::record(place_);
}

}  // namespace dltrain::cuda
