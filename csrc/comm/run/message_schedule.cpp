#include "comm/run/message_schedule.h"

namespace dltrain::comm {

Waiting MessageSchedule::waiting() const {
  std::lock_guard lock(mutex_);
  return waiting_;
}

void MessageSchedule::wait_for(const Waiting& waiting) {
  std::lock_guard lock(mutex_);
  waiting_ = waiting;
}

void MessageSchedule::wait_for(int peer, int round) {
  std::lock_guard lock(mutex_);
  waiting_.peers.assign(1, peer);
  waiting_.round = round;
}

}  // namespace dltrain::comm
