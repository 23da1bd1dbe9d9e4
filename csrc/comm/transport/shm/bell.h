#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/cache_line.h"

namespace dltrain::comm::shm {

// Wakes one process that waits for others, through memory that they share; all members are 0 at first. Any thread of any process may ring.
//
//   while (!has_come()) {           has_come = true;
//     const auto sleep = bell.lie_down();     bell.ring();
//     if (!has_come()) sleep.at_most(time);
//   }
//
// What has_come() reads has to be written and read in sequentially consistent order, as the bell itself: then either the process that rings
// sees that the owner has lain down, or the owner sees what it waits for.
class alignas(2 * cache_line) Bell {
 public:
  class Sleep {
   public:
    Sleep(const Sleep&) = delete;
    Sleep& operator=(const Sleep&) = delete;
    ~Sleep();
    // Returns when the bell has rung since the owner lay down, or after this time.
    void at_most(std::chrono::nanoseconds time) const;

   private:
    friend class Bell;
    explicit Sleep(Bell& bell);
    Bell& bell_;
    const uint32_t rung_;
  };

  [[nodiscard]] Sleep lie_down() { return Sleep(*this); }
  void ring();

 private:
  std::atomic<uint32_t> rung_ = 0, sleepers_ = 0;
};

}  // namespace dltrain::comm::shm
