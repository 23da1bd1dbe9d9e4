#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/execution_context.h"
#include "kernels/encode_sum.h"
#include "kernels/statistics.h"

namespace dltrain {

// Values that a message stands for.
struct Decoding {
  int64_t numel;
  const uint8_t* message;
  TypedPointer values;
};

// A codec of kernels/codecs.h, by its name.
struct Codec {
  std::string name;
  int64_t block;      // elements that share a scale; 1 where there is none
  int64_t alignment;  // elements; where a message that is one of several may begin
  bool scaled;
  int bits;  // of a code
  math::Bound nearest_error, stochastic_error;
  bool is_lossy() const { return nearest_error.max > 0.0; }
  int64_t (*bytes)(int64_t numel);  // of a message
  // Those of a list have nothing to do with each other: on CUDA they are one launch, or a few.
  void (*encode_sums)(const ExecutionContext& context, std::span<const Sum> sums);
  void (*decode_all)(const ExecutionContext& context, std::span<const Decoding> messages);
  void (*decode)(const ExecutionContext& context, int64_t numel, const uint8_t* message, const TypedPointer& values,
                 const Statistics& statistics);

  void encode_sum(const ExecutionContext& context, const Sum& sum) const { encode_sums(context, {&sum, 1}); }
};

const std::vector<Codec>& codecs();
std::vector<std::string> codec_names();

// Throws std::invalid_argument naming the codecs there are.
const Codec& find_codec(const std::string& name);

}  // namespace dltrain
