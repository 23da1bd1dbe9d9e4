#pragma once

#include <memory>

#include "core/execution_context.h"

struct CUevent_st;

namespace dltrain {

// A point in the order of a context's work. On the CPU work is done when its call returns, so an event has always been passed.
class Event {
 public:
  Event() = default;
  static Event record(const ExecutionContext& context);

  // Work that the context is given from now on runs after the event.
  void wait(const ExecutionContext& context) const;

  // Returns when the event has been passed.
  void synchronize() const;

  bool passed() const;

 private:
  std::shared_ptr<CUevent_st> event_;
  int device_ = 0;
};

}  // namespace dltrain
