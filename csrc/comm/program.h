#pragma once

// A program is a plan lowered onto a tensor: chunks became spans of elements, and the rounds of all segments were laid out in ticks.
// Segment s runs round t in tick s + t, so that while one segment is on the wire another is folded:
//
//   tick         0    1    2    3    4
//   segment 0   r0   r1   r2
//   segment 1        r0   r1   r2
//   segment 2             r0   r1   r2

#include <cstdint>
#include <vector>

#include "comm/plan.h"
#include "kernels/codec.h"

namespace dltrain::comm {

struct Span {  // of elements
  int64_t first = 0, count = 0;
};

// values[span] = own contribution and what came in, in rank order.
struct FoldStep {
  Span span;
  std::vector<int64_t> inboxes;  // where in the inbox each operand lies
  int own_place;                 // so many operands come before my own
  bool scales;                   // my contribution is used for the first time: scale it
};

struct Transfer {
  int peer;
  int round;
  int segment;
  bool inbox;  // the span lies in the inbox, not in the tensor
  Span span;
};

// One segment's share of a tick. It begins when the segment's round before is complete, whatever the other segments wait for.
struct Part {
  int segment;
  std::vector<FoldStep> folds;
  std::vector<Transfer> sends;
  std::vector<Transfer> ahead;  // receives of the next tick, which may be posted once the folds have emptied their places
};

struct Program {
  std::string algorithm;
  int rounds = 0;
  int segments = 0;
  int64_t inbox = 0;            // elements
  int64_t sent = 0;             // elements
  std::vector<Transfer> first;  // the receives of tick 0
  std::vector<std::vector<Part>> ticks;
};

// Lowers a verified plan onto numel elements cut into `segments`.
Program lower(const Plan& plan, const Codec& codec, int64_t numel, int segments);

}  // namespace dltrain::comm
