#pragma once

// A program is a plan lowered onto a tensor: chunks are spans of elements, messages have locations in memory, and the rounds of all
// segments are ordered by ticks. Segment s runs round t in tick s + t, so that one segment is sent while another one is encoded:
//
//   tick         0    1    2    3    4
//   segment 0   r0   r1   r2
//   segment 1        r0   r1   r2
//   segment 2             r0   r1   r2
//
// Each chunk has a slot for its message. The slot first holds what this rank encodes of the chunk, piece by piece, and later the final
// bytes. The slots of a segment are adjacent, so that several chunks can travel as one message. Partials of the peers are received into
// the receive buffer, and stay there until their chunk is encoded, so that each element is added up and encoded in one pass.

#include <cstdint>
#include <vector>

#include "comm/plan/plan.h"
#include "comm/program/layout.h"
#include "kernels/codec.h"

namespace dltrain::comm {

struct Location {  // of a message
  enum class Area { slots, receive_buffer } area;
  int64_t offset;  // bytes
};

// Adds up the messages of a region and, unless one of them contains it already, this rank's own contribution.
struct SumStep {
  Region region;
  std::vector<Location> received;
  bool own;
  int own_position;  // the number of messages that are added before the own contribution
  int64_t slot;      // the offset at which the sum is written as a message; -1: it is not encoded
  bool decodes;      // the decoded message or, if there is none, the sum is written to the tensor
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
  bool at_once = false;  // a received message that is used up in the next tick
};

// The work of one segment in a tick. It begins when the previous round of this segment is complete; it does not wait for other segments.
struct SegmentWork {
  int segment;
  std::vector<SumStep> sums;
  std::vector<Transfer> sends;
  std::vector<Transfer> ahead;      // receives of the next tick; they may be posted when the sums have read the receive buffer
  std::vector<DecodeStep> decodes;  // no message depends on these
};

// values: the final bytes are decoded into the tensor. values_in_place: the slots are the tensor itself, which is divided evenly and whose
// bytes are its messages. message: the final bytes stay in the slots, which are the result of the call.
enum class Result { values, values_in_place, message };

struct Program {
  int algorithm = 0;  // the number of the plan
  Result result = Result::values;
  int rounds = 0;
  int segments = 0;
  int64_t slots = 0, receive_buffer = 0;  // bytes
  int64_t receive_slot = 0;               // bytes of the receive buffer for one message
  int64_t sent = 0;                       // bytes
  std::vector<Transfer> first;            // the receives of tick 0
  std::vector<std::vector<SegmentWork>> ticks;
};

// Lowers a verified plan onto the pieces of each segment. Result::message needs a plan for which leaves_final_bytes is true.
Program lower(const Plan& plan, const std::vector<std::vector<Piece>>& segments, Result result);

// The content of the message that is the result of a call.
struct Encoded {
  int64_t bytes = 0;  // a multiple of a cache line
  std::vector<DecodeStep> parts;
};
Encoded encoded(int chunks, const std::vector<std::vector<Piece>>& segments);

// The program of a call without elements: each rank only reports to the next one in which call it is.
Program handshake_program(int rank, int world_size);

}  // namespace dltrain::comm
