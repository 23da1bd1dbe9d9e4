#include "kernels/codec.h"

#include <algorithm>
#include <iterator>

#include "core/cache_line.h"
#include "core/check.h"
#include "core/memory.h"
#include "kernels/codecs.h"
#include "kernels/decode.h"
#include "kernels/map_blocks.h"

namespace dltrain {

namespace {

constexpr int64_t cache = 16 << 20;  // bytes; larger outputs would not stay in the cache

// Runs map_blocks on the jobs that `make` returns for the items of the list.
template <class Operation, class Given, class Make>
void map_all(const ExecutionContext& context, std::span<const Given> list, Make make) {
  static thread_local std::vector<Job<Operation>> jobs;  // static, so that its memory is reused
  if (list.size() == 1) {
    const Job<Operation> job = make(list.front());
    return map_blocks(context, job.numel, job.operation);
  }
  jobs.clear();
  std::transform(list.begin(), list.end(), std::back_inserter(jobs), make);
  map_blocks(context, std::span<const Job<Operation>>(jobs));
}

template <class C>
void encode_sums(const ExecutionContext& context, std::span<const Sum> sums) {
  map_all<EncodeSum<C>>(context, sums, [](const Sum& sum) {
    const bool read_at_once = sum.feedback.residual.data || sum.decoded.data;
    return Job<EncodeSum<C>>{sum.numel, {sum, MessageLayout<C>::bytes(sum.numel) >= cache && !read_at_once}};
  });
}

template <class C>
void decode_all(const ExecutionContext& context, std::span<const Decoding> messages) {
  map_all<Decode<C>>(context, messages, [](const Decoding& each) {
    return Job<Decode<C>>{each.numel, {each.numel, each.message, each.values, nullptr, each.values.bytes(each.numel) >= cache}};
  });
}

template <class C>
void outer_steps(const ExecutionContext& context, std::span<const OuterUpdate> updates) {
  map_all<OuterStep<C>>(context, updates, [](const OuterUpdate& each) { return Job<OuterStep<C>>{each.numel, {each}}; });
}

template <class C>
void decode(const ExecutionContext& context, int64_t numel, const uint8_t* message, const TypedPointer& values,
            const Statistics& statistics) {
  const Decoding whole{numel, message, values};
  if (!statistics.sum_squares) return decode_all<C>(context, {&whole, 1});
  const int64_t tiles = MessageLayout<C>::tiles(numel);
  const Memory sums(context, (tiles + rests_of(tiles)) * static_cast<int64_t>(sizeof(double)));
  auto* const first = static_cast<double*>(sums.data());
  map_blocks(context, numel, Decode<C>{numel, message, values, first, values.bytes(numel) >= cache});
  add_up(context, first, tiles, statistics);
}

template <class C>
Codec entry() {
  using Layout = MessageLayout<C>;
  const auto bytes = [](int64_t numel) { return Layout::bytes(numel); };
  return {C::name,
          C::block,
          Layout::scaled ? C::block : cache_line / static_cast<int>(sizeof(typename C::Word)),
          Layout::scaled,
          C::bits,
          C::nearest_error,
          C::stochastic_error,
          bytes,
          encode_sums<C>,
          decode_all<C>,
          outer_steps<C>,
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
