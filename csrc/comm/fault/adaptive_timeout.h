#pragma once

#include <algorithm>
#include <chrono>

namespace dltrain::comm {

// How long to wait for an answer, by how long answers have taken. TCP estimates in this way when to send a packet again (RFC 6298), and
// doubles the time after each loss. Eight times the estimate allow for two losses in a row, and for a machine that is slow to answer.
class AdaptiveTimeout {
 public:
  using Seconds = std::chrono::duration<double>;

  // round_trip: the round-trip time of a packet between the ranks farthest from each other. An answer takes three of these times, because
  // Gloo sends nothing before the receiver has reported that it is ready.
  explicit AdaptiveTimeout(Seconds least, Seconds round_trip = Seconds(0)) : least_(least), smoothed_(3 * round_trip) {}

  void measure(Seconds taken) {
    deviation_ = 0.75 * deviation_ + 0.25 * std::chrono::abs(smoothed_ - taken);
    smoothed_ = 0.875 * smoothed_ + 0.125 * taken;
  }

  // The time within which an answer usually arrives.
  Seconds estimate() const { return smoothed_ + 4 * deviation_; }

  Seconds get() const { return std::max(least_, 8 * estimate()); }

 private:
  Seconds least_, smoothed_, deviation_{0};
};

}  // namespace dltrain::comm
