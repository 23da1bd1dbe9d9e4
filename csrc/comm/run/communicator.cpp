#include "comm/run/communicator.h"

#include <utility>

#include "core/check.h"

namespace dltrain::comm {

Communicator::Communicator(std::shared_ptr<Executor> across, std::shared_ptr<Executor> inside, const Hosts& hosts,
                           std::unique_ptr<ControlChannel> control, const std::vector<int>& ranks, const AdaptiveTimeout& answer_timeout)
    : across_(std::move(across)), inside_(std::move(inside)), hosts_(hosts) {
  if (inside_) two_levels_.emplace(*inside_, *across_, hosts);
  if (!control) return;
  const auto give_up = [this](const std::string& finding) { on_each_level([&](Executor& level) { level.give_up(finding); }); };
  failure_detector_ = std::make_shared<FailureDetector>(std::move(control), ranks,
                                                        FailureDetector::Calls{[this] { return waiting(); }, give_up}, answer_timeout);
  on_each_level([&](Executor& level) { level.set_failure_detector(failure_detector_); });
}

Communicator::~Communicator() {
  if (failure_detector_) failure_detector_->close();
}

void Communicator::run(const ExecutionContext& context, const TypedPointer& values, int64_t numel, const CallOptions& options) {
  if (!two_levels_) return across_->run(context, values, numel, options);
  check(options.collective == Collective::all_reduce && values.dtype == Dtype::fp32,
        "values: expected an all-reduce of fp32 in two levels");
  two_levels_->all_reduce(context, static_cast<float*>(values.data), numel, options);
}

void Communicator::attempt(const std::function<void()>& work) {
  if (failure_detector_) failure_detector_->begin();
  try {
    work();
  } catch (const CollectiveError& error) {
    on_each_level([&](Executor& level) { level.abort(error.what()); });
    close();
    throw;
  }
  ++calls_;
}

std::string Communicator::failure() const {
  std::string reason = across_->failure();
  return reason.empty() && inside_ ? inside_->failure() : reason;
}

// Closes the detector before calls fail: it must not report that this rank is well, and calls that ask for the culprit need not wait.
void Communicator::end(const std::string& reason) {
  on_each_level([&](Executor& level) { level.refuse(reason); });
  if (failure_detector_) failure_detector_->close();
  on_each_level([&](Executor& level) { level.end(reason); });
}

void Communicator::close() const noexcept {
  on_each_level([](Executor& level) { level.close(); });
}

void Communicator::drain() const {
  on_each_level([](Executor& level) { level.drain(); });
}

// In two levels the call may wait in either level, or in both.
Waiting Communicator::waiting() const {
  Waiting waiting = across_->waiting();
  if (!inside_) return waiting;
  const Waiting more = inside_->waiting();
  waiting.peers.insert(waiting.peers.end(), more.peers.begin(), more.peers.end());
  return waiting;
}

}  // namespace dltrain::comm
