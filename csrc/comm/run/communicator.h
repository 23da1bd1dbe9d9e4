#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/fault/adaptive_timeout.h"
#include "comm/fault/control_channel.h"
#include "comm/fault/failure_detector.h"
#include "comm/run/executor.h"
#include "comm/run/two_levels.h"

namespace dltrain::comm {

// Runs the calls of one rank of a group, one at a time: in one level of all ranks or, for all-reduces, in two levels, within and between
// the hosts. A failure of one level ends the other one, because peers of this rank may wait in either.
class Communicator {
 public:
  // across: the level of all ranks, or between the hosts. inside: the level within the host; null if there is one level. control: connects
  // all ranks, whose global ranks are `ranks`; null if there is only one rank.
  Communicator(std::shared_ptr<Executor> across, std::shared_ptr<Executor> inside, const Hosts& hosts,
               std::unique_ptr<ControlChannel> control, const std::vector<int>& ranks, const AdaptiveTimeout& answer_timeout);
  ~Communicator();

  bool is_in_two_levels() const { return inside_ != nullptr; }
  Executor& across() const { return *across_; }
  Executor* inside() const { return inside_.get(); }  // null if there is one level
  const Hosts& hosts() const { return hosts_; }

  // Like Executor::run. In two levels only an all-reduce of fp32 is possible.
  void run(const ExecutionContext& context, const TypedPointer& values, int64_t numel, const CallOptions& options);

  // Begins a call and does its work. If it throws CollectiveError, both levels are aborted.
  void attempt(const std::function<void()>& work);

  std::string failure() const;  // why calls fail; empty while they do not

  // The global rank that is responsible for the failure; nothing if there is none, or it is not known.
  std::optional<int> culprit() const { return failure_detector_ ? failure_detector_->culprit() : std::nullopt; }

  // Makes the call in progress and all later calls fail with `reason`. Any thread may call it.
  void end(const std::string& reason);
  // Notifies the peers. To be called when no call is in progress.
  void close() const noexcept;
  void drain() const;  // returns when all enqueued work is done or has failed

  int64_t calls() const { return calls_; }
  // The bytes that this rank has sent: in one level or between the hosts; within the host.
  int64_t wire_bytes() const { return across_->wire_bytes(); }
  int64_t inside_bytes() const { return inside_ ? inside_->wire_bytes() : 0; }

 private:
  template <class Act>
  void on_each_level(Act act) const {
    act(*across_);
    if (inside_) act(*inside_);
  }
  Waiting waiting() const;

  const std::shared_ptr<Executor> across_, inside_;
  const Hosts hosts_;
  std::optional<TwoLevels> two_levels_;
  std::atomic<int64_t> calls_ = 0;
  std::shared_ptr<FailureDetector> failure_detector_;  // null if there is only one rank
};

}  // namespace dltrain::comm
