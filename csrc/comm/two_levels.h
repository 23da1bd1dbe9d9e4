#pragma once

#include <functional>
#include <memory>

#include "comm/executor.h"
#include "core/cuda/runtime.h"
#include "core/queue.h"

namespace dltrain::comm {

// How many an all-reduce in two levels makes of so many elements.
int64_t pieces_of(int64_t numel);

// An all-reduce in two levels. Inside, the ranks of a host add up and share out; across, each rank has its share reduced with those that
// stand where it stands on the other hosts, by a plan and a codec; and inside again all get all shares. So a host's link carries what one
// of its ranks would send, and not what all of them would.
//
//   host 0   rank 0  a a b b            aa ..  --- across --->  AA ..            AA BB
//            rank 1  a a b b  -inside-> .. bb  --- across --->  .. BB  -inside-> AA BB
//
// There are as many shares as the smallest host has ranks. The other ranks of a larger one, rank 2 of three, say, give their part and get
// the result, and are by themselves across.
//
// A long tensor goes in pieces, so that the ranks of a host are busy with one while another is on the link.
class TwoLevels {
 public:
  // world_size: ranks of all hosts.
  TwoLevels(Executor& inside, Executor& across, int shares, int world_size)
      : inside_(inside), across_(across), shares_(shares), world_size_(world_size) {}

  // In place. Throws AllReduceError; then both levels have failed.
  void all_reduce(const Place& place, float* values, int64_t numel, const AllReduce& call);

 private:
  using Wait = std::function<void()>;  // until what was started is done, for the place
  Wait start_across(const Place& place, float* values, int64_t numel, const AllReduce& call, bool alone);

  Executor &inside_, &across_;
  const int shares_, world_size_;
  std::shared_ptr<cuda::Stream> stream_;  // of what goes across, on a device; shared: a build without CUDA has no destructor of it
  Queue worker_;                          // on the CPU
};

}  // namespace dltrain::comm
