#pragma once

#include <cstdint>
#include <string>

#include "comm/plan/collective.h"
#include "comm/program/crossover.h"
#include "kernels/codec.h"

namespace dltrain::comm {

// What a call runs, where it says only what it wants.
struct Selection {
  int algorithm;  // the plan's number
  int segments;
};

// algorithm: a plan's name, or "auto" or "butterfly". segments: 0 for as many as suit a rank's message of wire_bytes. crossover: what auto
// goes by for an all-reduce; by size alone, where it is null.
Selection select(Collective collective, const std::string& algorithm, int segments, int world_size, int64_t numel, const Codec& codec,
                 int64_t wire_bytes, const Crossover* crossover = nullptr);

}  // namespace dltrain::comm
