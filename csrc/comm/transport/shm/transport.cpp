#include "comm/transport/shm/transport.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <utility>

#include "comm/transport/header.h"
#include "core/check.h"

namespace dltrain::comm::shm {

namespace {

// A wait is short if each rank has a core. If not, polling would keep the peer from its core.
constexpr auto polling_time = std::chrono::microseconds(2), yielding_time = std::chrono::microseconds(50);
constexpr auto sleeping_time = std::chrono::milliseconds(50);  // until the peer's process is looked at

// What a message begins with. Number and mark say that these bytes are not something else.
struct alignas(2 * cache_line) Beginning {
  static constexpr uint64_t mark_of_all = 0x6d65737361676531;
  Header header;
  int64_t number;
  uint64_t mark;
};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

struct Transport::Peer {
  Writer out;
  Reader in;
  int64_t sent = 0, received = 0;              // messages that have begun
  std::deque<Message*> sending{}, expected{};  // messages that are not complete

  // The beginning of the next message, if it has come; it stays where it is.
  bool next(Beginning& beginning) const {
    if (in.filled() < static_cast<int64_t>(sizeof beginning)) return false;
    std::memcpy(&beginning, in.next(), sizeof beginning);
    if (beginning.mark != Beginning::mark_of_all || beginning.number != received)
      throw TransportError("no message begins where one should: another process has written to the memory");
    return true;
  }
};

// A message that this rank sends or receives.
class Transport::Message : public Request {
 public:
  Message(Transport& transport, int peer, std::deque<Message*>& queue, int64_t bytes)
      : peer(peer), bytes(bytes), call(transport.call_), transport_(transport), queue_(queue) {
    queue_.push_back(this);
  }
  ~Message() override { std::erase(queue_, this); }

  void wait(Deadline deadline) override {
    if (!is_over()) transport_.wait(*this, deadline);
    if (error_) std::rethrow_exception(error_);
  }
  void abort() override { transport_.abort(); }

  // Moves what can be moved at once. Returns whether anything has changed.
  virtual bool advance(Peer& peer) = 0;
  bool is_over() const { return error_ || (has_begun && done_ == bytes); }

  // Whether it is still where it has arrived. Messages behind it have to wait until it has left.
  virtual bool stays() const { return false; }
  virtual void leave() {}

  const int peer;
  const int64_t bytes;
  const Call call;
  bool has_begun = false;

 protected:
  friend class Transport;
  int64_t done_ = 0;  // bytes
  std::exception_ptr error_;
  Transport& transport_;
  std::deque<Message*>& queue_;
};

class Transport::Sent : public Message {
 public:
  Sent(Transport& transport, int peer, const void* data, int64_t bytes)
      : Message(transport, peer, transport.peers_.at(peer).sending, bytes), data_(static_cast<const std::byte*>(data)) {}

  bool advance(Peer& to) override {
    bool changed = false;
    if (!has_begun) {
      if (to.out.room() < static_cast<int64_t>(sizeof(Beginning))) return false;
      const Beginning beginning{{call, bytes}, to.sent++, Beginning::mark_of_all};
      to.out.write(&beginning, sizeof beginning);
      has_begun = changed = true;
    }
    while (const int64_t some = to.out.write(data_ + done_, bytes - done_)) {
      done_ += some;
      changed = true;
    }
    return changed;
  }

 private:
  const std::byte* const data_;
};

class Transport::Received : public Message {
 public:
  Received(Transport& transport, int peer, void* data, int64_t bytes, bool may_stay)
      : Message(transport, peer, transport.peers_.at(peer).expected, bytes), may_stay_(may_stay), data_(static_cast<std::byte*>(data)) {}
  ~Received() override {
    if (place_) make_room();
  }

  const void* place() const override { return place_; }
  bool stays() const override { return place_; }
  void leave() override {
    if (!place_) return;
    std::memcpy(data_, place_, static_cast<size_t>(bytes));
    make_room();
  }

  bool advance(Peer& from) override {
    bool changed = false;
    if (!has_begun) {
      Beginning beginning;
      try {
        if (!from.next(beginning)) return false;
        check_header(beginning.header, call, bytes);
      } catch (const TransportError&) {
        error_ = std::current_exception();
        return true;
      }
      from.in.read(&beginning, sizeof beginning);
      ++from.received;
      has_begun = changed = true;
    }
    if (may_stay_ && 0 < bytes && bytes <= from.in.size() / 2) {
      if (from.in.filled() < bytes) return changed;
      place_ = from.in.next();
      done_ = bytes;
      return true;
    }
    while (const int64_t some = from.in.read(data_ + done_, bytes - done_)) {
      done_ += some;
      changed = true;
    }
    return changed;
  }

 private:
  void make_room() {
    transport_.peers_.at(peer).in.skip(bytes);
    transport_.group_->member(peer).bell.ring();
    place_ = nullptr;
  }

  const bool may_stay_;
  std::byte* const data_;
  const std::byte* place_ = nullptr;
};

Transport::Transport(std::shared_ptr<Group> group, int rank, std::function<bool(int)> is_alive)
    : group_(std::move(group)), rank_(rank), process_(getpid()), is_alive_(std::move(is_alive)) {
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank) peers_.emplace(peer, Peer{group_->writer(rank, peer), group_->reader(peer, rank)});
  }
  if (rank != 0) group_->close();
}

Transport::~Transport() { Transport::close(); }

// What is received is still in the cache when it is added, and is not copied before: a chunk of a segment takes a part of a ring.
int64_t Transport::segment_bytes() const { return int64_t{64} * 1024 * world_size(); }

std::unique_ptr<Request> Transport::send(const ExecutionContext&, int peer, const void* data, int64_t bytes, int) {
  auto message = std::make_unique<Sent>(*this, peer, data, bytes);
  progress(peer);
  return message;
}

std::unique_ptr<Request> Transport::recv(const ExecutionContext&, int peer, void* data, int64_t bytes, int) {
  return std::make_unique<Received>(*this, peer, data, bytes, false);
}

std::unique_ptr<Request> Transport::recv_in_place(const ExecutionContext&, int peer, void* data, int64_t bytes) {
  return std::make_unique<Received>(*this, peer, data, bytes, true);
}

bool Transport::progress(int rank) {
  Peer& peer = peers_.at(rank);
  bool changed = false;
  for (std::deque<Message*>* const queue : {&peer.sending, &peer.expected}) {
    while (!queue->empty()) {
      Message& first = *queue->front();
      if (!first.is_over()) changed |= first.advance(peer);
      if (!first.is_over() || first.stays()) break;
      queue->pop_front();
    }
  }
  if (changed) group_->member(rank).bell.ring();
  return changed;
}

bool Transport::progress() {
  bool changed = false;
  for (auto& [rank, peer] : peers_) changed |= progress(rank);
  return changed;
}

void Transport::wait(const Message& message, Deadline deadline) {
  const Group::Member& peer = group_->member(message.peer);
  Clock::time_point idle_since{};
  bool is_alive = true;
  while (!message.is_over()) {
    if (message.queue_.front() != &message) message.queue_.front()->leave();
    const bool was_closed = peer.has_closed, was_alive = is_alive;  // what came before that has come
    const bool changed = progress();
    if (message.is_over()) break;
    if (aborted_) throw TransportError("aborted");
    const auto now = Clock::now();
    if (changed) {
      idle_since = now;
      continue;
    }
    if (was_closed) check_header({peer.latest, Header::closed}, message.call, message.bytes);
    if (!was_alive) throw TransportError("its process has ended");
    if (now >= deadline) throw TransportError("nothing came");
    if (idle_since == Clock::time_point{}) idle_since = now;
    if (now - idle_since < polling_time) {
      pause();
    } else if (now - idle_since < yielding_time) {
      sched_yield();
    } else {
      for (auto& [rank, other] : peers_) {  // what stays may be in the way of what another rank waits for
        if (!other.expected.empty()) other.expected.front()->leave();
      }
      const Bell::Sleep sleep = group_->member(rank_).bell.lie_down();
      if (progress() || aborted_ || peer.has_closed) continue;
      sleep.at_most(std::min<std::chrono::nanoseconds>(sleeping_time, deadline - now));
      is_alive = is_alive_(message.peer);
    }
  }
}

void Transport::abort() {
  aborted_ = true;
  group_->member(rank_).bell.ring();
}

std::string Transport::last_words(int rank) {
  const Peer& peer = peers_.at(rank);
  Beginning beginning;
  const bool is_between = peer.expected.empty() || !peer.expected.front()->has_begun;
  if (is_between && peer.next(beginning) && beginning.header.call != call_) return difference(beginning.header, call_);
  const Group::Member& member = group_->member(rank);
  return member.has_closed ? difference({member.latest, Header::closed}, call_) : "";
}

void Transport::close() noexcept {
  Group::Member& own = group_->member(rank_);
  if (own.has_closed || getpid() != process_) return;
  own.latest = call_;
  own.has_closed = true;
  for (int rank = 0; rank < world_size(); ++rank) group_->member(rank).bell.ring();
  group_->close();
  is_alive_ = nullptr;
}

}  // namespace dltrain::comm::shm
