#include "comm/fault/failure_detector.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "core/check.h"
#include "core/clock.h"

namespace dltrain::comm {

namespace {

constexpr auto passing_on = std::chrono::seconds(1);      // how long a failed call waits for others; or the answer timeout
constexpr auto interval = std::chrono::milliseconds(50);  // between two attempts to send, at least; they show whether a peer has left

}  // namespace

// close() waits until no object of this class exists. The mutex must be held to create or destroy one.
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
  while (const auto received = channel_->receive()) handle(received->from, received->notice);
}

void FailureDetector::handle(int peer, const ControlMessage& message) {
  ControlMessage answer;
  if (message.kind == ControlMessage::Kind::question)
    answer = {ControlMessage::Kind::answer, RankState::of(begun_, calls_.waiting()), {}, message.asked};
  Lock lock(mutex_);
  switch (message.kind) {
    case ControlMessage::Kind::question:
      send(peer, diagnosis_ ? ControlMessage{ControlMessage::Kind::diagnosis, {}, *diagnosis_} : answer);
      break;
    case ControlMessage::Kind::answer:
      answer_timeout_.measure(Clock::now().time_since_epoch() - Clock::duration(message.asked));
      peers_[peer].known.state = message.state;
      changed_.notify_all();
      break;
    case ControlMessage::Kind::diagnosis:
      peers_[peer].has_diagnosis = true;
      changed_.notify_all();
      adopt(lock, message.diagnosis);
      break;
  }
}

std::string FailureDetector::explain(const Waiting& waiting) {
  Lock lock(mutex_);
  if (closed_) return {};
  const Busy busy(*this);
  if (!diagnosis_ && !std::exchange(inquiring_, true)) inquire(lock, waiting);
  return wait_for_others(lock);
}

std::string FailureDetector::declare(Diagnosis::Cause cause, const Waiting& waiting) {
  Lock lock(mutex_);
  if (closed_) return {};
  const Busy busy(*this);
  const int self = global(channel_->rank());
  const int culprit = cause == Diagnosis::Cause::disagreement ? waiting.peers.at(0) : self;
  adopt(lock, {cause, culprit, self, waiting.round, begun_});
  return wait_for_others(lock);
}

std::optional<int> FailureDetector::culprit() {
  const Lock lock(mutex_);
  if (!diagnosis_) return {};
  const auto cause = diagnosis_->cause;
  if (cause == Diagnosis::Cause::none || cause == Diagnosis::Cause::disagreement) return {};
  return diagnosis_->culprit;
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
  adopt(lock, judge(global(channel_->rank()), begun_, waiting, others));
}

// The first diagnosis counts. Every rank passes it on, so a rank that has received it from all others may leave.
void FailureDetector::adopt(Lock& lock, const Diagnosis& diagnosis) {
  if (diagnosis_ || closed_) return;
  diagnosis_ = diagnosis;
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    if (peer != channel_->rank()) send(peer, {ControlMessage::Kind::diagnosis, {}, diagnosis});
  }
  changed_.notify_all();
  if (diagnosis.cause == Diagnosis::Cause::disagreement) return;  // not aborted: a rank that receives the other call reports more
  lock.unlock();
  calls_.give_up(describe(diagnosis));
  lock.lock();
}

// Returns when there is a diagnosis and the other ranks have it, or when the time for that is over.
std::string FailureDetector::wait_for_others(Lock& lock) {
  changed_.wait(lock, [this] { return diagnosis_ || closed_; });
  if (!diagnosis_) return {};
  const Diagnosis diagnosis = *diagnosis_;
  const auto end = Clock::now() + std::max<AdaptiveTimeout::Seconds>(passing_on, answer_timeout_.get());
  const auto is_over = [&] { return closed_ || all_have(diagnosis); };
  while (!is_over() && Clock::now() < end) {
    changed_.wait_for(lock, std::min<AdaptiveTimeout::Seconds>(pause(), end - Clock::now()), is_over);
    for (int peer = 0; peer < std::ssize(peers_); ++peer) {
      if (peer != channel_->rank() && !peers_[peer].has_diagnosis) send(peer, {ControlMessage::Kind::diagnosis, {}, diagnosis});
    }
  }
  return describe(diagnosis);
}

AdaptiveTimeout::Seconds FailureDetector::pause() const { return std::max<AdaptiveTimeout::Seconds>(interval, answer_timeout_.estimate()); }

void FailureDetector::ask(int peer) { send(peer, {ControlMessage::Kind::question, {}, {}, Clock::now().time_since_epoch().count()}); }

void FailureDetector::send(int peer, const ControlMessage& message) {
  if (!channel_->send(peer, message)) peers_[peer].known.left = true;
}

bool FailureDetector::all_have_answered() const {
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    const Known& known = peers_[peer].known;
    if (peer != channel_->rank() && !known.left && !known.state) return false;
  }
  return true;
}

bool FailureDetector::all_have(const Diagnosis& diagnosis) const {
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    const bool silent = inquired_ && !peers_[peer].known.state;
    const bool blamed = diagnosis.cause == Diagnosis::Cause::silent && diagnosis.culprit == global(peer);
    if (peer != channel_->rank() && !peers_[peer].has_diagnosis && !peers_[peer].known.left && !silent && !blamed) return false;
  }
  return true;
}

}  // namespace dltrain::comm
