#pragma once

#include <cstdint>
#include <vector>

#include "core/execution_context.h"
#include "core/span.h"

namespace dltrain::comm {

enum class ScalarType { int8, uint8, int32, int64, fp16, bf16, fp32, fp64 };

// What a backend does by itself with values that lie at a place, in place and in the order of the context's work. Throws TransportError.
class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual void all_reduce(const ExecutionContext& context, void* values, int64_t numel, ScalarType number, bool average) = 0;

  // shares[r] is rank r's. Afterwards that holds the sum (or average) of it over the ranks; what the others hold is undefined.
  virtual void reduce_scatter(const ExecutionContext& context, float* values, const std::vector<Span>& shards, bool average) = 0;
  // Afterwards all ranks hold each rank's share as that rank had it.
  virtual void all_gather(const ExecutionContext& context, float* values, const std::vector<Span>& shards) = 0;
};

}  // namespace dltrain::comm
