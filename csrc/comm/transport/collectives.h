#pragma once

#include <cstdint>
#include <vector>

#include "core/execution_context.h"
#include "core/span.h"

namespace dltrain::comm {

enum class ScalarType { int8, uint8, int32, int64, fp16, bf16, fp32, fp64 };

// The collectives of a backend. They work in place, on memory of the context and in the order of its work. They throw TransportError.
class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual void all_reduce(const ExecutionContext& context, void* values, int64_t numel, ScalarType type, bool average) = 0;

  // shards[r] belongs to rank r, and holds the sum (or average) over the ranks afterwards. The content of the other shards is undefined.
  virtual void reduce_scatter(const ExecutionContext& context, float* values, const std::vector<Span>& shards, bool average) = 0;
  // Afterwards every rank has the shard of each rank.
  virtual void all_gather(const ExecutionContext& context, float* values, const std::vector<Span>& shards) = 0;
};

}  // namespace dltrain::comm
