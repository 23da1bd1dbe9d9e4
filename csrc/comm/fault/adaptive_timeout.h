#pragma once

#include <algorithm>
#include <chrono>

namespace dltrain::comm {

// How long to wait for an answer, by how long answers have taken. TCP estimates so when to send a packet again (RFC 6298), doubling the
// time for each further loss: eight of these times have room for two losses in a row, and for a machine that is slow to answer.
class AdaptiveTimeout {
 public:
  using Seconds = std::chrono::duration<double>;

  // round_trip: between the ranks farthest from each other, of a packet. An answer takes three, since Gloo sends nothing before the
  // receiver has said that it is ready.
  explicit AdaptiveTimeout(Seconds least, Seconds round_trip = Seconds(0)) : least_(least), smoothed_(3 * round_trip) {}

  void measure(Seconds taken) {
    deviation_ = 0.75 * deviation_ + 0.25 * std::chrono::abs(smoothed_ - taken);
    smoothed_ = 0.875 * smoothed_ + 0.125 * taken;
  }

  // By when an answer is there as a rule.
  Seconds estimate() const { return smoothed_ + 4 * deviation_; }

  Seconds get() const { return std::max(least_, 8 * estimate()); }

 private:
  Seconds least_, smoothed_, deviation_{0};
};

}  // namespace dltrain::comm
