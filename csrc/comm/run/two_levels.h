#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "comm/run/executor.h"
#include "core/cuda/runtime.h"
#include "core/memory.h"
#include "core/queue.h"

namespace dltrain::comm {

// How many an all-reduce in two levels makes of so many elements.
int64_t pieces_of(int64_t numel);

struct Hosts {
  int count;
  int shards;  // of each
  int ranks;   // of all
};

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
// A long tensor goes in pieces, so that the ranks of a host are busy with one while another is on the link. What comes from across is
// shared inside as it is, encoded, where that saves enough bytes: then every rank decodes all shares.
class TwoLevels {
 public:
  static constexpr int64_t enough = 1 << 20;

  // saving: so many bytes of a piece make it worth the decoding that its messages are shared inside, and not its values.
  TwoLevels(Executor& inside, Executor& across, const Hosts& hosts, int64_t saving = enough)
      : inside_(inside), across_(across), hosts_(hosts), saving_(saving) {}

  // In place. Throws CollectiveError; then both levels have failed.
  void all_reduce(const ExecutionContext& context, float* values, int64_t numel, const CallOptions& call);

 private:
  struct Slice {
    Span span;
    std::vector<Span> inside;         // by rank inside, what each has of it, counted from its first element
    std::vector<Span> shards;         // the same, counted from the tensor's
    std::vector<Layout> layouts;      // of these, where the call has one
    int64_t message_bytes = 0;        // of a share's message, the same for all; 0 where values are shared inside
    std::vector<DecodeStep> decodes;  // of all shares' messages, side by side
  };
  using Wait = std::function<void()>;  // until what was started is done, for the place

  const std::vector<Slice>& pieces(int64_t numel, const CallOptions& call);
  Slice piece(const Span& span, const CallOptions& call) const;
  Wait start_across(const ExecutionContext& context, float* values, int64_t numel, const CallOptions& call, bool alone);
  void share_out(const ExecutionContext& context, float* values, const Slice& piece, char* messages, std::chrono::milliseconds timeout);

  Executor &inside_, &across_;
  const Hosts hosts_;
  const int64_t saving_;
  using Key = std::tuple<std::tuple<int64_t, std::string, std::string, int, bool>, Layout>;
  std::map<Key, std::vector<Slice>, std::less<>> pieces_;
  std::vector<Buffer> messages_;  // by piece
  std::vector<Decoding> decodings_;
  std::shared_ptr<cuda::Stream> stream_;  // of what goes across, on a device; shared: a build without CUDA has no destructor of it
  Queue worker_;                          // on the CPU
};

}  // namespace dltrain::comm
