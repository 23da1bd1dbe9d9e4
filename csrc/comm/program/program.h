#pragma once

// A program is a plan lowered onto a tensor: chunks became spans of elements, their messages got places, and the rounds of all segments
// were laid out in ticks. Segment s runs round t in tick s + t, so that while one segment is on the wire another is encoded:
//
//   tick         0    1    2    3    4
//   segment 0   r0   r1   r2
//   segment 1        r0   r1   r2
//   segment 2             r0   r1   r2
//
// Each chunk has a slot for its one message: what this rank encodes of it, piece by piece, and later the final bytes. The slots of a
// segment lie side by side, so that several chunks travel as one message. Partials of the peers come into the inbox, and stay there until
// what they are part of is encoded: each element is added up and encoded in one pass.

#include <cstdint>
#include <vector>

#include "comm/plan/plan.h"
#include "comm/program/layout.h"
#include "kernels/codec.h"

namespace dltrain::comm {

struct Location {  // of a message
  enum class Room { slots, receive_buffer } room;
  int64_t offset;  // bytes
};

// Adds up the messages of a region and, where it is not part of one of them, the rank's own contribution.
struct SumStep {
  Region region;
  std::vector<Location> received;
  bool own;
  int own_position;  // so many of the messages come before it
  int64_t slot;      // where the sum's message goes; -1: nowhere
  bool decodes;      // the tensor becomes what the message stands for or, where there is none, the sum
};

struct DecodeStep {
  Region region;
  int64_t slot;
};

struct Transfer {
  int peer;
  int round;
  int segment;
  Location location;
  int64_t bytes;
};

// One segment's share of a tick. It begins when the segment's round before is complete, whatever the other segments wait for.
struct SegmentWork {
  int segment;
  std::vector<SumStep> sums;
  std::vector<Transfer> sends;
  std::vector<Transfer> ahead;      // receives of the next tick, which may be posted once the sums have emptied their places
  std::vector<DecodeStep> decodes;  // nobody waits for these
};

// What becomes of the final bytes: the tensor's values, or, for a tensor evenly cut whose messages are its very bytes, they lie in the
// tensor from the start, or they stay in the slots, which are the call's result.
enum class Result { values, values_in_place, message };

struct Program {
  int algorithm = 0;  // the plan's number
  Result result = Result::values;
  int rounds = 0;
  int segments = 0;
  int64_t slots = 0, receive_buffer = 0;  // bytes
  int64_t sent = 0;                       // bytes
  std::vector<Transfer> first;            // the receives of tick 0
  std::vector<std::vector<SegmentWork>> ticks;
};

// Lowers a verified plan onto what is to be reduced, by segment. A message needs a plan that leaves_final_bytes.
Program lower(const Plan& plan, const std::vector<std::vector<Piece>>& segments, Result result);

// What a message, as a result, holds.
struct Encoded {
  int64_t bytes = 0;  // a multiple of a cache line
  std::vector<DecodeStep> parts;
};
Encoded encoded(int chunks, const std::vector<std::vector<Piece>>& segments);

// Where there is nothing to reduce: the ranks only say which call they are in, each to the next.
Program handshake_program(int rank, int world_size);

}  // namespace dltrain::comm
