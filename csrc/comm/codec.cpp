#include "comm/codec.h"

#include "core/check.h"

namespace dltrain::comm {

const std::vector<Codec>& codecs() {
  static const std::vector<Codec> entries = {
      {"raw", 16},  // a cache line
  };
  return entries;
}

const Codec& find_codec(const std::string& name) {
  std::string names;
  for (const Codec& codec : codecs()) {
    if (codec.name == name) return codec;
    names += (names.empty() ? "" : ", ") + codec.name;
  }
  throw std::invalid_argument(text("codec: expected one of ", names, ", got '", name, "'"));
}

}  // namespace dltrain::comm
