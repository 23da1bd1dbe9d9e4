#pragma once

#include <cstdint>
#include <deque>

#include "core/clock.h"

namespace dltrain::ps {

// When the graces of a server end. All are equally long, so they end in the order in which they began.
class Graces {
 public:
  struct Grace {
    int block = 0;
    int64_t version = 0;  // that is to be made
    Deadline end = Deadline::max();
  };

  explicit Graces(Clock::duration length) : length_(length) {}

  void begin(int block, int64_t version) { graces_.push_back({block, version, Clock::now() + length_}); }

  // The next one that ends. is_over(grace): its version is made already.
  template <class IsOver>
  const Grace* next(IsOver&& is_over) {
    while (!graces_.empty() && is_over(graces_.front())) graces_.pop_front();
    return graces_.empty() ? nullptr : &graces_.front();
  }

 private:
  const Clock::duration length_;
  std::deque<Grace> graces_;
};

}  // namespace dltrain::ps
