#include "comm/transport/shm/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace dltrain::comm::shm {

namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* time) {
  syscall(SYS_futex, &word, operation, value, time, nullptr, 0);
}

}  // namespace

Bell::Sleep::Sleep(Bell& bell) : bell_(bell), rung_(bell.rung_.load()) { bell_.sleepers_.fetch_add(1); }

Bell::Sleep::~Sleep() { bell_.sleepers_.fetch_sub(1); }

void Bell::Sleep::at_most(std::chrono::nanoseconds time) const {
  constexpr int64_t second = 1'000'000'000;
  const timespec limit{static_cast<time_t>(time.count() / second), static_cast<long>(time.count() % second)};
  futex(bell_.rung_, FUTEX_WAIT, rung_, &limit);
}

void Bell::ring() {
  if (sleepers_.load() == 0) return;
  rung_.fetch_add(1);
  futex(rung_, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace dltrain::comm::shm
