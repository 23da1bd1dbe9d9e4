#pragma once

#include <memory>

#include "core/place.h"

struct CUevent_st;

namespace dltrain {

// A point in the order of a place's work. On the CPU, where work is done when its call returns, it has always been passed.
class Event {
 public:
  Event() = default;
  static Event record(const Place& place);

  // What the place is given from now on runs after the event.
  void wait(const Place& place) const;

  // Returns when the event has been passed.
  void synchronize() const;

  bool passed() const;

 private:
  std::shared_ptr<CUevent_st> event_;
  int device_ = 0;
};

}  // namespace dltrain
