#pragma once

// Predicts how long a collective takes on a modelled network. It follows the programs that the executor would run tick by tick, with clocks
// instead of messages and kernels. A message of b bytes from one host to another:
//
//   sender's core    |- b copy -|
//   sender's link     |---- b / bandwidth ----|                 after the earlier messages
//   receiver's link   <latency>|---- b / bandwidth ----|        after the earlier messages
//   receiver's core            |- b copy -|
//
// This is the alpha-beta-gamma model (Thakur, Rabenseifner, Gropp 2005) with contention for links and for a limited number of cores.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/plan/collective.h"
#include "kernels/codec.h"

namespace dltrain::comm {

struct Network {
  double latency = 0;                               // s, from one host to another
  double bandwidth = 0;                             // bytes/s of a host's link, each way
  int ranks_per_host = 1;                           // these ranks share the link of the host
  double inside_latency = 0, inside_bandwidth = 0;  // between the ranks of a host; the bandwidth is that of each rank, each way
  double burst = 0;                                 // bytes that pass a host's link at once after a pause, as with a token bucket
  double overhead = 0;                              // s that a rank spends on each message, at either end
  double copy = 0;                                  // s that a core spends on each byte, at either end, in parallel to the rank's work
  int cores = 0;                                    // the number of cores that all ranks share; 0: unlimited
};

struct Speed {  // of a codec: s for each element
  double encode = 0;
  double decode = 0;  // and add
};

struct Estimate {
  double seconds = 0;      // from the start of the first rank to the end of the last one
  int64_t wire_bytes = 0;  // sent by a rank; the maximum over the ranks
  int rounds = 0, segments = 0;
  std::string algorithm;
};

// For numel elements of fp32. segments: 0 for the number that the executor selects. late: the skew, by how many seconds each rank begins
// later; empty if all begin together. Throws std::invalid_argument, which names the argument.
Estimate simulate(Collective collective, const std::string& algorithm, int world_size, int64_t numel, const Codec& codec, int segments,
                  const Network& network, const Speed& speed, const std::vector<double>& late = {});

// For a parameter server: all workers push numel elements to the servers that hold the pieces, and pull the sum of a piece as soon as it is
// complete. The workers fill hosts of `ranks_per_host`; each server has a host of its own. segments: the number of pieces of each server;
// 0: as many as make 1 MiB of fp32 each, but at most 64.
Estimate simulate_servers(int workers, int servers, int64_t numel, const Codec& codec, int segments, const Network& network,
                          const Speed& speed);

}  // namespace dltrain::comm
