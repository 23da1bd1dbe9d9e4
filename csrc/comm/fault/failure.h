#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "core/dtype.h"
#include "core/event.h"
#include "core/execution_context.h"
#include "core/memory.h"

namespace dltrain::comm {

// The reason why the calls of a group fail. The first reason that is set counts. Any thread may set it.
class Failure {
 public:
  void set(const std::string& reason);
  // Sets a provisional reason, which set() replaces.
  void set_for_now(const std::string& reason);
  std::string reason() const;  // empty if there is none
  bool is_set() const;         // whether there is a reason that is not provisional

  // Enqueues a kernel: if there is a reason when the device executes it, the values become NaN, so that they are not taken for a result.
  void poison(const ExecutionContext& context, const TypedPointer& values, int64_t numel);
  void captured();  // the latest poison() is part of a CUDA graph, which may run at any later time

  // Returns when the device has read the flag for the latest poison().
  void drain() const { read_.synchronize(); }

 private:
  void set(const std::string& reason, bool complete);
  int* flag_on(int device);

  mutable std::mutex mutex_;
  std::string reason_;
  bool complete_ = false;
  std::shared_ptr<Memory> flag_;  // an int that the device reads; null before the first poison()
  Event read_;                    // passed when the device has read the flag
};

}  // namespace dltrain::comm
