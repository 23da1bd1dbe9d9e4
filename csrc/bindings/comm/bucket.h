#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/execution_context.h"
#include "comm/program/layout.h"
#include "comm/run/phase.h"
#include "core/clock.h"

namespace dltrain::bindings {

// The tensors of error feedback for the elements of a tensor; see dltrain::Feedback.
struct FeedbackTensors {
  std::optional<at::Tensor> residual, spare, swapped, loss_scale;
  bool keeps_idle = false;

  void check(const at::Tensor& tensor) const;
  Feedback elements() const;
  void keep_for(const ExecutionContext& context) const;
};

// The state of a flat tensor, such as a DDP bucket, that is kept from step to step: its regions and their codecs, the residuals, and
// statistics of the collectives.
class BucketState : public comm::Observer {
 public:
  // The layout has regions of parameters. by_parameter: they are divided separately. squares: optional, a float64 per region.
  BucketState(comm::Layout layout, bool by_parameter, std::optional<at::Tensor> squares, FeedbackTensors feedback);

  void check(const at::Tensor& tensor) const;
  // Throws unless each region, if it is divided separately, belongs to one of `owners` ranks, or to none if there are no owners.
  void check_owners(int owners) const;

  const comm::Layout* layout() const { return by_parameter_ ? &layout_ : nullptr; }
  const FeedbackTensors& feedback() const { return feedback_; }

  // squares <- the sum of squares of each parameter's elements, if `squares` was given.
  void add_up(const ExecutionContext& context, const at::Tensor& tensor) const;
  void keep_for(const ExecutionContext& context) const;

  // Called by one collective after another, never by two at the same time.
  void started(Clock::time_point submitted);
  void ended(Clock::time_point submitted, int64_t wire_bytes);
  void begin(comm::Phase phase) override;
  void end(comm::Phase phase) override;

  // Sums over all its collectives, by name; in seconds, except "calls" and "wire_bytes".
  std::vector<std::pair<const char*, double>> stats() const;

 private:
  using Duration = std::atomic<int64_t>;  // nanoseconds; written by one thread, read by others

  const comm::Layout layout_;
  const bool by_parameter_;
  const std::optional<at::Tensor> squares_;
  const FeedbackTensors feedback_;

  std::atomic<int64_t> calls_ = 0, wire_bytes_ = 0;
  Duration queued_ = 0, busy_ = 0, late_ = 0;
  std::array<Duration, comm::phases> phases_{};
  Clock::time_point start_;
};

}  // namespace dltrain::bindings
