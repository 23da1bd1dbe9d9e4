#pragma once

// How long a collective takes on a modelled network: the programs that the executor would run, walked tick by tick with clocks in the
// place of messages and kernels. A message of b bytes, from one host to another:
//
//   sender's core    |- b copy -|
//   sender's link     |---- b / bandwidth ----|                 behind the messages before it
//   receiver's link   <latency>|---- b / bandwidth ----|        likewise
//   receiver's core            |- b copy -|
//
// It is the alpha-beta-gamma model (Thakur, Rabenseifner, Gropp 2005) with contention: for links, and for cores where hosts have few.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/plan/collective.h"
#include "kernels/codec.h"

namespace dltrain::comm {

struct Network {
  double latency = 0;                               // s, from one host to another
  double bandwidth = 0;                             // bytes/s of a host's link, each way
  int ranks_per_host = 1;                           // which share it
  double inside_latency = 0, inside_bandwidth = 0;  // between ranks of one host; of each rank, each way
  double burst = 0;                                 // bytes that a host's link has let through at once after a pause: a token bucket
  double overhead = 0;                              // s of a rank's own time for each message, at either end
  double copy = 0;                                  // s of a core for each byte, at either end, beside what the rank does
  int cores = 0;                                    // that all ranks share; 0: nobody waits for one
};

struct Speed {  // of a codec: s for each element
  double encode = 0;
  double decode = 0;  // and add
};

struct Estimate {
  double seconds = 0;      // from the first rank's beginning to the last one's end
  int64_t wire_bytes = 0;  // sent by a rank, the largest over the ranks
  int rounds = 0, segments = 0;
  std::string algorithm;
};

// For numel elements of fp32. segments: 0 for what the executor would choose. late: s by which each rank begins later; empty where none
// does. Throws std::invalid_argument naming the argument.
Estimate simulate(Collective collective, const std::string& algorithm, int world_size, int64_t numel, const Codec& codec, int segments,
                  const Network& network, const Speed& speed, const std::vector<double>& late = {});

}  // namespace dltrain::comm
