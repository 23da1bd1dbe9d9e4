#include "comm/fault/failure_detector.h"

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
class FailureDetector::Busy {
 public:
  explicit Busy(FailureDetector& failure_detector) : failure_detector_(failure_detector) { ++failure_detector_.busy_; }
  ~Busy() {
    --failure_detector_.busy_;
    failure_detector_.changed_.notify_all();
  }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  FailureDetector& failure_detector_;
};

FailureDetector::FailureDetector(std::unique_ptr<ControlChannel> channel, std::vector<int> global_ranks, Calls calls,
                                 const AdaptiveTimeout& answer_timeout)
    : channel_(std::move(channel)),
      global_ranks_(std::move(global_ranks)),
      calls_(std::move(calls)),
      peers_(channel_->world_size()),
      answer_timeout_(answer_timeout) {
  thread_ = std::thread([this] { run(); });
}

void FailureDetector::close() {
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

void FailureDetector::run() {
  while (const auto received = channel_->receive()) hear(received->from, received->notice);
}

void FailureDetector::hear(int peer, const ControlMessage& notice) {
  ControlMessage answer;
  if (notice.kind == ControlMessage::Kind::question)
    answer = {ControlMessage::Kind::answer, RankState::of(begun_, calls_.waiting()), {}, notice.asked};
  Lock lock(mutex_);
  switch (notice.kind) {
    case ControlMessage::Kind::question:
      tell(peer, diagnosis_ ? ControlMessage{ControlMessage::Kind::diagnosis, {}, *diagnosis_} : answer);
      break;
    case ControlMessage::Kind::answer:
      answer_timeout_.measure(Clock::now().time_since_epoch() - Clock::duration(notice.asked));
      peers_[peer].known.state = notice.state;
      changed_.notify_all();
      break;
    case ControlMessage::Kind::diagnosis:
      peers_[peer].knows = true;
      changed_.notify_all();
      learn(lock, notice.diagnosis);
      break;
  }
}

std::string FailureDetector::explain(const Waiting& waiting) {
  Lock lock(mutex_);
  if (closed_) return {};
  const Busy busy(*this);
  if (!diagnosis_ && !std::exchange(inquiring_, true)) inquire(lock, waiting);
  return settle(lock);
}

std::string FailureDetector::declare(Diagnosis::Cause cause, const Waiting& waiting) {
  Lock lock(mutex_);
  if (closed_) return {};
  const Busy busy(*this);
  const int self = global(channel_->rank());
  const int culprit = cause == Diagnosis::Cause::disagreement ? waiting.peers.at(0) : self;
  learn(lock, {cause, culprit, self, waiting.round, begun_});
  return settle(lock);
}

void FailureDetector::inquire(Lock& lock, const Waiting& waiting) {
  const auto began = Clock::now();
  const auto is_over = [this] { return diagnosis_ || closed_ || all_have_answered(); };
  while (!is_over() && Clock::now() - began < answer_timeout_.get()) {
    for (int peer = 0; peer < std::ssize(peers_); ++peer) {
      if (peer != channel_->rank() && !peers_[peer].known.state) ask(peer);
    }
    changed_.wait_for(lock, std::min<AdaptiveTimeout::Seconds>(pause(), answer_timeout_.get() - (Clock::now() - began)), is_over);
  }
  if (diagnosis_ || closed_) return;
  inquired_ = true;
  std::map<int, Known> others;
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    if (peer != channel_->rank()) others[global(peer)] = peers_[peer].known;
  }
  learn(lock, judge(global(channel_->rank()), begun_, waiting, others));
}

// The first one counts. Everybody passes it on, so who has heard of it from all others may leave.
void FailureDetector::learn(Lock& lock, const Diagnosis& diagnosis) {
  if (diagnosis_ || closed_) return;
  diagnosis_ = diagnosis;
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    if (peer != channel_->rank()) tell(peer, {ControlMessage::Kind::diagnosis, {}, diagnosis});
  }
  changed_.notify_all();
  if (diagnosis.cause == Diagnosis::Cause::disagreement) return;  // who meets the other call has more to say
  lock.unlock();
  calls_.give_up(describe(diagnosis));
  lock.lock();
}

// Returns when there is a verdict and the others know it.
std::string FailureDetector::settle(Lock& lock) {
  changed_.wait(lock, [this] { return diagnosis_ || closed_; });
  if (!diagnosis_) return {};
  const Diagnosis diagnosis = *diagnosis_;
  const auto end = Clock::now() + std::max<AdaptiveTimeout::Seconds>(settling, answer_timeout_.get());
  const auto settled = [&] { return closed_ || all_know(diagnosis); };
  while (!settled() && Clock::now() < end) {
    changed_.wait_for(lock, std::min<AdaptiveTimeout::Seconds>(pause(), end - Clock::now()), settled);
    for (int peer = 0; peer < std::ssize(peers_); ++peer) {
      if (peer != channel_->rank() && !peers_[peer].knows) tell(peer, {ControlMessage::Kind::diagnosis, {}, diagnosis});
    }
  }
  return describe(diagnosis);
}

AdaptiveTimeout::Seconds FailureDetector::pause() const { return std::max<AdaptiveTimeout::Seconds>(interval, answer_timeout_.estimate()); }

void FailureDetector::ask(int peer) { tell(peer, {ControlMessage::Kind::question, {}, {}, Clock::now().time_since_epoch().count()}); }

void FailureDetector::tell(int peer, const ControlMessage& notice) {
  if (!channel_->send(peer, notice)) peers_[peer].known.left = true;
}

bool FailureDetector::all_have_answered() const {
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    const Known& known = peers_[peer].known;
    if (peer != channel_->rank() && !known.left && !known.state) return false;
  }
  return true;
}

bool FailureDetector::all_know(const Diagnosis& diagnosis) const {
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    const bool silent = inquired_ && !peers_[peer].known.state;
    const bool blamed = diagnosis.cause == Diagnosis::Cause::silent && diagnosis.culprit == global(peer);
    if (peer != channel_->rank() && !peers_[peer].knows && !peers_[peer].known.left && !silent && !blamed) return false;
  }
  return true;
}

}  // namespace dltrain::comm
