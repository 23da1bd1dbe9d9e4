#include "kernels/codec.h"

#include "core/check.h"
#include "core/memory.h"
#include "kernels/codecs.h"
#include "kernels/decode.h"
#include "kernels/map_blocks.h"

namespace dltrain {

namespace {

constexpr int64_t cache = 16 << 20;  // bytes: what is written and more than this will not be found there

template <class C>
void encode_sum(const Place& place, const Sum& sum) {
  const bool read_at_once = sum.feedback.residual.data || sum.decoded.data;
  map_blocks(place, sum.numel, EncodeSum<C>{sum, Message<C>::bytes(sum.numel) >= cache && !read_at_once});
}

template <class C>
void decode(const Place& place, int64_t numel, const uint8_t* message, const Elements& values, const Statistics& statistics) {
  const bool past_cache = values.bytes(numel) >= cache;
  if (!statistics.sum_squares) return map_blocks(place, numel, Decode<C>{numel, message, values, nullptr, past_cache});
  const int64_t tiles = Message<C>::tiles(numel);
  const Memory sums(place, (tiles + rests_of(tiles)) * static_cast<int64_t>(sizeof(double)));
  auto* const first = static_cast<double*>(sums.data());
  map_blocks(place, numel, Decode<C>{numel, message, values, first, past_cache});
  add_up(place, first, tiles, statistics);
}

template <class C>
Codec entry() {
  using Layout = Message<C>;
  constexpr int64_t cache_line = 64;
  const auto bytes = [](int64_t numel) { return Layout::bytes(numel); };
  return {C::name,
          C::block,
          Layout::scaled ? C::block : cache_line / static_cast<int64_t>(sizeof(typename C::Unit)),
          Layout::scaled,
          C::bits,
          C::nearest_error,
          C::stochastic_error,
          bytes,
          encode_sum<C>,
          decode<C>};
}

template <class... C>
std::vector<Codec> entries(const std::tuple<C...>*) {
  return {entry<C>()...};
}

}  // namespace

const std::vector<Codec>& codecs() {
  static const std::vector<Codec> all = entries(static_cast<const Codecs*>(nullptr));
  return all;
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

}  // namespace dltrain
