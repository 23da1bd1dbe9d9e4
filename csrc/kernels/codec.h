#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/place.h"
#include "kernels/encode_sum.h"
#include "kernels/statistics.h"

namespace dltrain {

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
  void (*encode_sum)(const Place& place, const Sum& sum);
  void (*decode)(const Place& place, int64_t numel, const uint8_t* message, const Elements& values, const Statistics& statistics);
};

const std::vector<Codec>& codecs();
std::vector<std::string> codec_names();

// Throws std::invalid_argument naming the codecs there are.
const Codec& find_codec(const std::string& name);

}  // namespace dltrain
