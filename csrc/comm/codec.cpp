#include "comm/codec.h"

#include "core/check.h"

namespace dltrain::comm {

const std::vector<Codec>& codecs() {
  static const std::vector<Codec> entries = {
      {"raw", 16},  // a cache line
  };
  return entries;
}

std::vector<std::string> codec_names() {
  std::vector<std::string> names;
  for (const Codec& codec : codecs()) names.push_back(codec.name);
  return names;
}

const Codec& find_codec(const std::string& name) {
  for (const Codec& codec : codecs()) {
    if (codec.name == name) return codec;
  }
  unknown_name("codec", codec_names(), name);
}

}  // namespace dltrain::comm
