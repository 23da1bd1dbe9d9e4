#pragma once

#include <cstdint>
#include <string>

#include "comm/plan/collective.h"
#include "comm/program/crossover.h"
#include "kernels/codec.h"

namespace dltrain::comm {

// The plan and the number of segments that a call uses.
struct Selection {
  int algorithm;  // the number of the plan
  int segments;
};

// algorithm: the name of a plan, "auto" or "butterfly". segments: 0 selects the number by wire_bytes, the size of a rank's message.
// crossover: the measurements by which "auto" selects the plan of an all-reduce; if null, it selects by size only. segment_bytes: the size
// of segments that suits the transport; 0: that of a network.
Selection select(Collective collective, const std::string& algorithm, int segments, int world_size, int64_t numel, const Codec& codec,
                 int64_t wire_bytes, const Crossover* crossover = nullptr, int64_t segment_bytes = 0);

// The number of segments of a message of wire_bytes if segments of this size suit the transport.
int segments_of(int64_t wire_bytes, int64_t segment_bytes);

}  // namespace dltrain::comm
