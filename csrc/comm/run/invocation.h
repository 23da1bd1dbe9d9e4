#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/program/program.h"
#include "comm/run/phase.h"
#include "comm/transport/transport.h"
#include "core/execution_context.h"
#include "kernels/codec.h"

namespace dltrain::comm {

// What a call is to do.
struct CallOptions {
  Collective collective = Collective::all_reduce;
  std::string algorithm = "auto";
  std::string codec = "raw";
  bool average = false;
  float weight = 0;       // of this rank in an average; 0: as much as each of the others
  int root = 0;           // where there is one
  bool is_half = false;   // of an all-reduce in two levels, which is what errors then name
  int segments = 0;       // 0: chosen by size
  bool measures = false;  // on the CPU "auto" goes by times, for which its first call makes some more; else by size
  std::chrono::milliseconds timeout = std::chrono::minutes(30);

  char* message = nullptr;  // where given, the final bytes stay there, as Executor::encoded says, and the values as they are

  std::vector<Span> shards;  // of the values, by rank, where chunk r is rank r's: as many for each where there are none
  TypedPointer shard;        // where given, this rank's share of a reduce-scatter goes there, and the values stay as they are

  std::string type;       // of what the values stand for, where it is not theirs: ranks have to agree on it
  int64_t agreement = 0;  // and on this digest, where it is not 0

  const Layout* layout = nullptr;  // null: the tensor as a whole, in the codec; not null: that codec is the one to choose by
  Feedback feedback;               // for the values or, of an all-gather, for this rank's share
  bool stochastic = false;         // rounding
  uint64_t seed = 0;
  int64_t first = 0;             // the number of the first element: each draws its own random numbers
  std::optional<uint32_t> step;  // of the stream of random numbers; the number of the call where there is none
  Observer* observer = nullptr;
};

// Has the messages decoded that lie at such distances from `messages`, those of a codec together. decodings: room, which is kept.
void decode(const ExecutionContext& context, std::span<const DecodeStep> steps, const char* messages, const TypedPointer& values,
            std::vector<Decoding>& decodings);

// Room for what is done at once, kept from call to call.
struct Scratch {
  std::vector<const uint8_t*> received;
  std::vector<Sum> sums;
  std::vector<DecodeStep> decodes;
  std::vector<Decoding> decodings;
};

// One call: its program, where its bytes lie, and what is done with them between the messages.
struct Invocation {
  const Program& program;
  const std::string& algorithm;
  const CallOptions& call;
  int rank, world_size;
  ExecutionContext context;
  TypedPointer values;
  int64_t numel = 0;
  char *slots = nullptr, *receive_buffer = nullptr;
  uint32_t step = 0;
  Scratch* scratch = nullptr;

  char* at(const Location& location) const { return (location.area == Location::Area::slots ? slots : receive_buffer) + location.offset; }
  // Those of some parts at once, which on a device are one launch for each codec.
  void sum(std::span<const SegmentWork* const> parts) const;
  void decode(std::span<const SegmentWork* const> parts) const;

 private:
  std::optional<Sum> sum_of(const SumStep& step) const;
  TypedPointer result(const Span& span) const;
};

}  // namespace dltrain::comm
