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

// The options of a call.
struct CallOptions {
  Collective collective = Collective::all_reduce;
  std::string algorithm = "auto";
  std::string codec = "raw";
  bool average = false;
  float weight = 0;       // of this rank in an average; 0: all ranks have the same weight
  int root = 0;           // 0 if the collective has no root
  bool is_half = false;   // one half of an all-reduce in two levels, which errors then name
  int segments = 0;       // 0: selected by size
  bool measures = false;  // on the CPU "auto" selects by times, which its first call measures; otherwise by size
  std::chrono::milliseconds timeout = std::chrono::minutes(30);

  char* message = nullptr;  // if not null, the final bytes are written here in the layout of encoded(), and the values do not change

  std::vector<Span> shards;  // of the values, by rank, if chunk r belongs to rank r; empty: equal shards, or the layout has owners
  TypedPointer shard;        // if not null, this rank's shard of a reduce-scatter is written here, and the values do not change

  std::string type;       // the element type of the tensor if the values are only its bytes; ranks have to agree on it
  int64_t agreement = 0;  // a digest on which ranks have to agree, too; 0: none

  std::span<const TypedPointer> minus;  // by region of the layout, is subtracted from this rank's own values; empty: nothing is

  const Layout* layout = nullptr;  // null: the whole tensor is encoded by `codec`; otherwise `codec` only selects the plan, and regions
                                   // have owners if the collective has
  Feedback feedback;               // for the values or, in an all-gather, for this rank's shard
  bool stochastic = false;         // rounding
  uint64_t seed = 0;
  int64_t first = 0;             // the number of the first element; each element has random numbers of its own
  std::optional<uint32_t> step;  // of the stream of random numbers; by default the number of the call
  Observer* observer = nullptr;

  // What is subtracted from the values from `first` on.
  TypedPointer minus_from(int64_t first) const;
};

// Decodes the messages at the slots of the steps, which are offsets from `messages`; those of a codec together. decodings: scratch memory.
void decode(const ExecutionContext& context, std::span<const DecodeStep> steps, const char* messages, const TypedPointer& values,
            std::vector<Decoding>& decodings);

// Scratch memory for steps that are executed together, kept from call to call.
struct Scratch {
  std::vector<const char*> places;  // by slot of the receive buffer: of a message that is somewhere else, or null
  std::vector<const uint8_t*> received;
  std::vector<Sum> sums;
  std::vector<DecodeStep> decodes;
  std::vector<Decoding> decodings;
};

// One call: its program, the memory of its messages, and the work between the messages.
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

  // Where a message is sent from, or is to be received.
  char* at(const Location& location) const { return (location.area == Location::Area::slots ? slots : receive_buffer) + location.offset; }
  // Where a message lies, or a part of one: there, or where it has arrived.
  const char* found_at(const Location& location) const;
  // Execute the steps of several parts together; on a device this is one launch for each codec.
  void sum(std::span<const SegmentWork* const> parts) const;
  void decode(std::span<const SegmentWork* const> parts) const;

 private:
  std::optional<Sum> sum_of(const SumStep& step) const;
  TypedPointer result(const Span& span) const;
};

}  // namespace dltrain::comm
