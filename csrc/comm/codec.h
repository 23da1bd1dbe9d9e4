#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dltrain::comm {

// What a plan's messages carry. raw: the fp32 partials themselves, so that they are sent from and received into the tensor.
struct Codec {
  std::string name;
  int64_t block;  // chunk borders fall on multiples of so many elements
};

const std::vector<Codec>& codecs();
std::vector<std::string> codec_names();

// Throws std::invalid_argument naming the codecs there are.
const Codec& find_codec(const std::string& name);

}  // namespace dltrain::comm
