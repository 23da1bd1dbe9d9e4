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

// The calls of one rank of a group, one at a time: over all ranks at once or, all-reduces with levels inside and across the hosts, in two.
// What becomes of one level becomes of the other, since peers of one may wait in the other.
class Communicator {
 public:
  // inside: null where there is one level. control: of all ranks, whose names in errors are `ranks`; null where there is one rank.
  Communicator(std::shared_ptr<Executor> across, std::shared_ptr<Executor> inside, const Hosts& hosts,
               std::unique_ptr<ControlChannel> control, const std::vector<int>& ranks, const AdaptiveTimeout& answer_timeout);
  ~Communicator();

  bool is_in_two_levels() const { return inside_ != nullptr; }
  Executor& across() const { return *across_; }
  Executor* inside() const { return inside_.get(); }  // null where there is one level
  const Hosts& hosts() const { return hosts_; }

  // As Executor::run has it. In two levels: an all-reduce of fp32.
  void run(const ExecutionContext& context, const TypedPointer& values, int64_t numel, const CallOptions& options);

  // Does the work of a call, which begins with it. Whatever fails in it is the end of both levels.
  void attempt(const std::function<void()>& work);

  std::string failure() const;  // why calls fail now; empty while they do not

  // From any thread: what is under way and all that comes later fails with `reason`.
  void end(const std::string& reason);
  // When nothing is under way any more: lets the peers know.
  void close() const noexcept;
  void drain() const;  // returns when what has been enqueued is done, or has failed

  int64_t calls() const { return calls_; }
  // Sent by this rank, in two levels across the hosts and inside.
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
  std::shared_ptr<FailureDetector> failure_detector_;  // null where there is one rank
};

}  // namespace dltrain::comm
