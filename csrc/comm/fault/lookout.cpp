#include "comm/fault/lookout.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "core/check.h"
#include "core/clock.h"

namespace dltrain::comm {

namespace {

constexpr auto settling = std::chrono::seconds(1);        // who has not heard by then, or by when answers come, is not waited for
constexpr auto interval = std::chrono::milliseconds(50);  // between two attempts, at least; they show whether a peer has left

}  // namespace

// While there is one, the lookout is not closed for good; under its mutex.
class Lookout::Busy {
 public:
  explicit Busy(Lookout& lookout) : lookout_(lookout) { ++lookout_.busy_; }
  ~Busy() {
    --lookout_.busy_;
    lookout_.changed_.notify_all();
  }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  Lookout& lookout_;
};

Lookout::Lookout(std::unique_ptr<Channel> channel, std::vector<int> global_ranks, Calls calls, const Patience& patience)
    : channel_(std::move(channel)),
      global_ranks_(std::move(global_ranks)),
      calls_(std::move(calls)),
      peers_(channel_->world_size()),
      patience_(patience) {
  thread_ = std::thread([this] { run(); });
}

void Lookout::close() {
  Lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
  std::thread thread = std::move(thread_);
  lock.unlock();
  channel_->close();
  if (thread.joinable()) thread.join();
  lock.lock();
  changed_.wait(lock, [this] { return busy_ == 0; });
}

void Lookout::run() {
  while (const auto received = channel_->receive()) hear(received->from, received->notice);
}

void Lookout::hear(int peer, const Notice& notice) {
  Notice answer;
  if (notice.kind == Notice::Kind::question) answer = {Notice::Kind::answer, State::of(begun_, calls_.waiting()), {}, notice.asked};
  Lock lock(mutex_);
  switch (notice.kind) {
    case Notice::Kind::question: tell(peer, verdict_ ? Notice{Notice::Kind::verdict, {}, *verdict_} : answer); break;
    case Notice::Kind::answer:
      patience_.measure(Clock::now().time_since_epoch() - Clock::duration(notice.asked));
      peers_[peer].known.state = notice.state;
      changed_.notify_all();
      break;
    case Notice::Kind::verdict:
      peers_[peer].knows = true;
      changed_.notify_all();
      learn(lock, notice.verdict);
      break;
  }
}

std::string Lookout::explain(const Waiting& waiting) {
  Lock lock(mutex_);
  if (closed_) return {};
  const Busy busy(*this);
  if (!verdict_ && !std::exchange(inquiring_, true)) inquire(lock, waiting);
  return settle(lock);
}

std::string Lookout::declare(Verdict::Manner manner, const Waiting& waiting) {
  Lock lock(mutex_);
  if (closed_) return {};
  const Busy busy(*this);
  const int self = global(channel_->rank());
  const int culprit = manner == Verdict::Manner::disagreement ? waiting.peers.at(0) : self;
  learn(lock, {manner, culprit, self, waiting.round, begun_});
  return settle(lock);
}

void Lookout::inquire(Lock& lock, const Waiting& waiting) {
  const auto began = Clock::now();
  const auto is_over = [this] { return verdict_ || closed_ || all_have_answered(); };
  while (!is_over() && Clock::now() - began < patience_.get()) {
    for (int peer = 0; peer < std::ssize(peers_); ++peer) {
      if (peer != channel_->rank() && !peers_[peer].known.state) ask(peer);
    }
    changed_.wait_for(lock, std::min<Patience::Seconds>(pause(), patience_.get() - (Clock::now() - began)), is_over);
  }
  if (verdict_ || closed_) return;
  inquired_ = true;
  std::map<int, Known> others;
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    if (peer != channel_->rank()) others[global(peer)] = peers_[peer].known;
  }
  learn(lock, judge(global(channel_->rank()), begun_, waiting, others));
}

// The first one counts. Everybody passes it on, so who has heard of it from all others may leave.
void Lookout::learn(Lock& lock, const Verdict& verdict) {
  if (verdict_ || closed_) return;
  verdict_ = verdict;
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    if (peer != channel_->rank()) tell(peer, {Notice::Kind::verdict, {}, verdict});
  }
  changed_.notify_all();
  if (verdict.manner == Verdict::Manner::disagreement) return;  // who meets the other call has more to say
  lock.unlock();
  calls_.give_up(describe(verdict));
  lock.lock();
}

// Returns when there is a verdict and the others know it.
std::string Lookout::settle(Lock& lock) {
  changed_.wait(lock, [this] { return verdict_ || closed_; });
  if (!verdict_) return {};
  const Verdict verdict = *verdict_;
  const auto end = Clock::now() + std::max<Patience::Seconds>(settling, patience_.get());
  const auto settled = [&] { return closed_ || all_know(verdict); };
  while (!settled() && Clock::now() < end) {
    changed_.wait_for(lock, std::min<Patience::Seconds>(pause(), end - Clock::now()), settled);
    for (int peer = 0; peer < std::ssize(peers_); ++peer) {
      if (peer != channel_->rank() && !peers_[peer].knows) tell(peer, {Notice::Kind::verdict, {}, verdict});
    }
  }
  return describe(verdict);
}

Patience::Seconds Lookout::pause() const { return std::max<Patience::Seconds>(interval, patience_.estimate()); }

void Lookout::ask(int peer) { tell(peer, {Notice::Kind::question, {}, {}, Clock::now().time_since_epoch().count()}); }

void Lookout::tell(int peer, const Notice& notice) {
  if (!channel_->send(peer, notice)) peers_[peer].known.left = true;
}

bool Lookout::all_have_answered() const {
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    const Known& known = peers_[peer].known;
    if (peer != channel_->rank() && !known.left && !known.state) return false;
  }
  return true;
}

bool Lookout::all_know(const Verdict& verdict) const {
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    const bool silent = inquired_ && !peers_[peer].known.state;
    const bool blamed = verdict.manner == Verdict::Manner::silent && verdict.culprit == global(peer);
    if (peer != channel_->rank() && !peers_[peer].knows && !peers_[peer].known.left && !silent && !blamed) return false;
  }
  return true;
}

}  // namespace dltrain::comm
