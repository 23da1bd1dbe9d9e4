#include "bindings/comm/gloo/waits.h"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <set>
#include <thread>
#include <utility>

#include "comm/transport/transport.h"

namespace dltrain::bindings {

namespace {

constexpr auto interval = std::chrono::milliseconds(100);
constexpr auto at_once = std::chrono::milliseconds(1);  // zero would mean no timeout

}  // namespace

// One per process: all its GlooWaits, and the thread that checks them.
class Rounds {
 public:
  // A child of fork() does not have the parent's threads, so it gets a new object.
  static Rounds& of_this_process() {
    static std::mutex guards;
    static Rounds* rounds = nullptr;
    static pid_t process = 0;
    const std::lock_guard lock(guards);
    if (process != getpid()) {
      rounds = new Rounds;
      process = getpid();
    }
    return *rounds;
  }

  void enter(GlooWaits& waits) {
    const std::lock_guard lock(mutex_);
    all_.insert(&waits);
    if (!thread_.joinable()) thread_ = std::jthread([this](const std::stop_token& end) { run(end); });
  }

  void leave(GlooWaits& waits) {
    std::jthread ended;
    const std::lock_guard lock(mutex_);
    if (all_.erase(&waits) > 0 && all_.empty()) ended = std::move(thread_);
  }

 private:
  void run(const std::stop_token& end) {
    std::unique_lock lock(mutex_);
    while (!end.stop_requested()) {
      for (GlooWaits* waits : all_) waits->look();
      ended_.wait_for(lock, end, interval, [] { return false; });
    }
  }

  std::mutex mutex_;  // guards the members below
  std::condition_variable_any ended_;
  std::set<GlooWaits*> all_;
  std::jthread thread_;  // runs while all_ is not empty
};

// Registers a wait during the entry's lifetime.
class GlooWaits::Entry {
 public:
  Entry(GlooWaits& waits, Wait& wait) : waits_(waits), wait_(wait) {
    const std::lock_guard lock(waits_.mutex_);
    waits_.waits_.push_back(&wait_);
  }
  ~Entry() {
    const std::lock_guard lock(waits_.mutex_);
    std::erase(waits_.waits_, &wait_);
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

 private:
  GlooWaits& waits_;
  Wait& wait_;
};

GlooWaits::GlooWaits(c10::intrusive_ptr<c10d::Backend> backend, Others others) : others_(others), backend_(std::move(backend)) {
  Rounds::of_this_process().enter(*this);
}

GlooWaits::~GlooWaits() { close(); }

bool GlooWaits::wait(int peer, c10d::Work& message, std::chrono::milliseconds timeout) {
  Wait wait{peer, message};
  {
    const Entry entry(*this, wait);
    if (message.wait(timeout)) return true;
    // The message may have been complete when its wait was ended. If not, look() ends this wait as well: a timeout would close all
    // connections.
    if (others_ == Others::leave && is_broken(wait) && message.wait(timeout)) return true;
  }
  if (!wait.is_broken) return false;
  constexpr auto reason = "the connection broke in the middle of a message";
  if (others_ == Others::leave) throw comm::TransportError(reason);
  try {
    return message.wait(at_once);  // it may have been complete when its wait was ended
  } catch (const std::exception&) {
    throw comm::TransportError(reason);
  }
}

bool GlooWaits::is_broken(const Wait& wait) {
  const std::lock_guard lock(mutex_);
  return wait.is_broken;
}

bool GlooWaits::any_has_broken() {
  const std::lock_guard lock(mutex_);
  for (int peer = 0; backend_ && peer < backend_->getSize(); ++peer) {
    if (peer != backend_->getRank() && has_broken(peer)) return true;
  }
  return false;
}

void GlooWaits::close() noexcept {
  Rounds::of_this_process().leave(*this);
  const std::lock_guard lock(mutex_);
  probes_.clear();
  backend_.reset();
}

void GlooWaits::look() {
  const std::lock_guard lock(mutex_);
  for (Wait* wait : waits_) {
    if (!backend_ || Clock::now() - wait->since < interval || !has_broken(wait->peer)) continue;
    wait->is_broken = true;
    wait->message.abort();
  }
}

// Needs the mutex. The wait of an aborted receive returns at once, unless the connection is broken: then it throws.
bool GlooWaits::has_broken(int peer) {
  try {
    c10::intrusive_ptr<c10d::Work>& probe = probes_[peer];
    if (!probe) {
      std::vector<at::Tensor> nothing = {at::empty({1}, at::kByte)};
      probe = backend_->recv(nothing, peer, tag);
    }
    probe->abort();
    probe->wait(at_once);
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace dltrain::bindings
