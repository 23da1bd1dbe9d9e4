#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/execution_context.h"
#include "kernels/encode_sum.h"
#include "kernels/outer_step.h"
#include "kernels/statistics.h"

namespace dltrain {

// One message to decode: `values` receives its `numel` elements.
struct Decoding {
  int64_t numel;
  const uint8_t* message;
  TypedPointer values;
};

// A codec of kernels/codecs.h, selected at run time by its name.
struct Codec {
  std::string name;
  int64_t block;      // elements that share a scale; 1 if there are no scales
  int64_t alignment;  // in elements; regions are divided among chunks at multiples of it
  bool scaled;
  int bits;  // per code
  math::Bound nearest_error, stochastic_error;
  bool is_lossy() const { return nearest_error.max > 0.0; }
  int64_t (*bytes)(int64_t numel);  // the size of a message
  // The items of a list are independent of each other. On CUDA they become one launch, or a few.
  void (*encode_sums)(const ExecutionContext& context, std::span<const Sum> sums);
  void (*decode_all)(const ExecutionContext& context, std::span<const Decoding> messages);
  void (*outer_steps)(const ExecutionContext& context, std::span<const OuterUpdate> updates);
  void (*decode)(const ExecutionContext& context, int64_t numel, const uint8_t* message, const TypedPointer& values,
                 const Statistics& statistics);

  void encode_sum(const ExecutionContext& context, const Sum& sum) const { encode_sums(context, {&sum, 1}); }
};

const std::vector<Codec>& codecs();
std::vector<std::string> codec_names();

// Throws std::invalid_argument, which lists the codecs, if none has this name.
const Codec& find_codec(const std::string& name);

}  // namespace dltrain
