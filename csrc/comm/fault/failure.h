#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "core/dtype.h"
#include "core/event.h"
#include "core/execution_context.h"
#include "core/memory.h"

namespace dltrain::comm {

// Why the calls of a group fail from some moment on: the first reason that it is given, by any thread.
class Failure {
 public:
  void set(const std::string& reason);
  // The same, but for a reason that is not the whole one: it makes room for the one that set brings.
  void set_for_now(const std::string& reason);
  std::string reason() const;  // empty where there is none
  bool is_set() const;         // to the whole one

  // Enqueues: if there is a reason when the device comes to it, the values become NaN, so that nobody takes them for a result.
  void poison(const ExecutionContext& context, const TypedPointer& values, int64_t numel);
  void captured();  // what was enqueued last is part of a graph, which runs when it likes, for as long as it likes

  // Returns when the device has read what it was told to.
  void drain() const { read_.synchronize(); }

 private:
  void set(const std::string& reason, bool whole);
  int* flag_on(int device);

  mutable std::mutex mutex_;
  std::string reason_;
  bool whole_ = false;
  std::shared_ptr<Memory> flag_;  // an int that the device reads; null before it is to
  Event read_;                    // for the last time
};

}  // namespace dltrain::comm
