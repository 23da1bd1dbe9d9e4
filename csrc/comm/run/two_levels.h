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

// The number of pieces into which an all-reduce in two levels divides numel elements.
int64_t pieces_of(int64_t numel);

struct Hosts {
  int count;
  int shards;  // of each host
  int ranks;   // of all hosts
};

// An all-reduce in two levels. The ranks of a host reduce-scatter. Between the hosts, each rank has its shard reduced with the ranks that
// have the same shard on the other hosts, by a plan and a codec. Then the ranks of a host all-gather. So a host's link carries the bytes
// that one of its ranks would send, and not those that all of them would send.
//
//   host 0   rank 0  a a b b                  aa ..  --- inter-host --->  AA ..                  AA BB
//            rank 1  a a b b  - intra-host -> .. bb  --- inter-host --->  .. BB  - intra-host -> AA BB
//
// There are as many shards as the smallest host has ranks. On a larger host the remaining ranks have no shard: they contribute their part
// and receive the result, and each of them is the only rank of its level between the hosts.
//
// A long tensor is divided into pieces, so that the ranks of a host work on one piece while another one is on the link. The messages with
// the final bytes are all-gathered within the host still encoded if that saves enough bytes; then every rank decodes all shards.
class TwoLevels {
 public:
  static constexpr int64_t enough = 1 << 20;

  // saving: messages instead of values are all-gathered within a host if this saves at least this many bytes of a piece.
  TwoLevels(Executor& intra_host, Executor& inter_host, const Hosts& hosts, int64_t saving = enough)
      : intra_host_(intra_host), inter_host_(inter_host), hosts_(hosts), saving_(saving) {}

  // Works in place. Throws CollectiveError; then both levels have failed.
  void all_reduce(const ExecutionContext& context, float* values, int64_t numel, const CallOptions& call);

 private:
  struct Slice {
    Span span;
    std::vector<Span> local_shards;   // by rank of the host, relative to the first element of the span
    std::vector<Span> shards;         // the same, relative to the first element of the tensor
    std::vector<Layout> layouts;      // of the shards, if the call has a layout
    int64_t message_bytes = 0;        // of the message of each shard; 0: values are all-gathered
    std::vector<DecodeStep> decodes;  // of the messages of all shards, which are adjacent
  };
  using Wait = std::function<void()>;  // makes the execution context wait until what was started is done

  const std::vector<Slice>& pieces(int64_t numel, const CallOptions& call);
  Slice piece(const Span& span, const CallOptions& call) const;
  Wait start_inter_host(const ExecutionContext& context, float* values, int64_t numel, const CallOptions& call, bool alone);
  void all_gather(const ExecutionContext& context, float* values, const Slice& piece, char* messages, std::chrono::milliseconds timeout);

  Executor &intra_host_, &inter_host_;
  const Hosts hosts_;
  const int64_t saving_;
  using Key = std::tuple<std::tuple<int64_t, std::string, std::string, int, bool>, Layout>;
  std::map<Key, std::vector<Slice>, std::less<>> pieces_;
  std::vector<Buffer> messages_;  // by piece
  std::vector<Decoding> decodings_;
  std::shared_ptr<cuda::Stream> stream_;  // between the hosts; shared_ptr because a build without CUDA has no destructor of Stream
  Queue worker_;                          // on the CPU
};

}  // namespace dltrain::comm
