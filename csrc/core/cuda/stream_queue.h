#pragma once

#include <functional>
#include <mutex>

#include "core/event.h"
#include "core/place.h"

namespace dltrain::cuda {

// The Queue on a CUDA device: tasks enqueue their work on a stream that is the queue's alone, in the order in which they are given. Events
// order it with the callers' streams, and no host thread waits.
class StreamQueue {
 public:
  explicit StreamQueue(const Place& place) : place_(place) {}

  using Task = std::function<void(const Place& place)>;

  // The task's work comes after what the caller's stream has been given, and before what it is given next.
  void run(const Place& caller, const Task& task) { submit(caller, task).wait(caller); }

  // The same, but the caller's stream goes on at once: who needs the result waits for the event.
  Event submit(const Place& caller, const Task& task);

  const Place& place() const { return place_; }

 private:
  const Place place_;
  std::mutex mutex_;
};

}  // namespace dltrain::cuda
