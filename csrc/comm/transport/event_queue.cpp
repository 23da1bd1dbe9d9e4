#include "comm/transport/event_queue.h"

#include <utility>

#include "core/check.h"

namespace dltrain::comm {

EventQueue::EventQueue(int world_size, int64_t limit) : limit_(limit), held_(world_size) {
  constexpr int64_t least = 1 << 20;  // acknowledgments come for less
  check(limit >= least, "limit: expected at least ", least, " bytes, got ", limit);
}

void EventQueue::wait_for_room(int peer) {
  std::unique_lock lock(mutex_);
  taken_.wait(lock, [&] { return state(peer) != Mailbox::SendResult::full; });
}

void EventQueue::push(Mailbox::Event event) {
  const std::lock_guard lock(mutex_);
  if (!closed_) add(std::move(event));
}

Mailbox::SendResult EventQueue::offer(Mailbox::Event event) {
  const std::lock_guard lock(mutex_);
  const auto result = state(event.from);
  if (result == Mailbox::SendResult::taken) add(std::move(event));
  return result;
}

Mailbox::SendResult EventQueue::would_take(int peer) const {
  const std::lock_guard lock(mutex_);
  return state(peer);
}

std::optional<Mailbox::Event> EventQueue::pop(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto is_over = [this] { return closed_ || !events_.empty(); };
  // To the longest deadline the standard library adds, which overflows.
  if (deadline == Deadline::max()) {
    arrived_.wait(lock, is_over);
  } else {
    arrived_.wait_until(lock, deadline, is_over);
  }
  if (events_.empty()) return {};
  Mailbox::Event event = std::move(events_.front());
  events_.pop_front();
  int64_t& held = held_[event.from];
  const bool was_full = held >= limit_;
  if (event.kind == Mailbox::Event::Kind::message) held -= cost(event.bytes);
  if (was_full && held < limit_) taken_.notify_all();
  return event;
}

void EventQueue::close() {
  std::deque<Mailbox::Event> dropped;  // outside of the mutex
  const std::lock_guard lock(mutex_);
  closed_ = true;
  dropped.swap(events_);
  arrived_.notify_all();
  taken_.notify_all();
}

bool EventQueue::is_closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

Mailbox::SendResult EventQueue::state(int peer) const {
  if (closed_) return Mailbox::SendResult::closed;
  return held_[peer] < limit_ ? Mailbox::SendResult::taken : Mailbox::SendResult::full;
}

void EventQueue::add(Mailbox::Event event) {
  if (event.kind == Mailbox::Event::Kind::message) held_[event.from] += cost(event.bytes);
  events_.push_back(std::move(event));
  arrived_.notify_one();
}

}  // namespace dltrain::comm
