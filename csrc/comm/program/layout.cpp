#include "comm/program/layout.h"

#include <algorithm>
#include <map>

#include "core/digest.h"

namespace dltrain::comm {

namespace {

int64_t ceil_div(int64_t count, int64_t by) { return (count + by - 1) / by; }

Piece even_piece(const Span& span, const Codec& codec) { return {{span, &codec, span.first}, codec.alignment}; }

// Spreads the remainders of all pieces evenly over the chunks. A piece of a parameter has the same value in every bucket.
uint32_t turn_of(int64_t number) { return static_cast<uint32_t>(dltrain::digest({number})); }

}  // namespace

size_t region_at(const Layout& layout, int64_t element) {
  const auto begins_after = [](int64_t at, const Region& region) { return at < region.span.first; };
  return std::upper_bound(layout.begin(), layout.end(), element, begins_after) - layout.begin() - 1;
}

Layout within(const Layout& layout, const Span& span) {
  Layout out;
  for (const Region& region : layout) {
    const int64_t begin = std::max(region.span.first, span.first);
    const int64_t end = std::min(region.span.first + region.span.count, span.first + span.count);
    if (begin >= end) continue;
    const int64_t skipped = (begin - region.span.first) / 4 * 4;
    out.push_back({{begin - span.first, end - begin}, region.codec, region.number + skipped, region.owner});
  }
  return out;
}

int64_t message_bytes(const Layout& layout) {
  int64_t bytes = 0;
  for (const Region& region : layout) bytes += region.codec->bytes(region.span.count);
  return bytes;
}

int64_t digest(const Layout& layout) {
  uint64_t all = 0;
  for (const auto& [span, codec, number, owner] : layout) {
    all = dltrain::digest({span.first, span.count, codec - codecs().data(), number, owner}, all);
  }
  return static_cast<int64_t>(all | 1);
}

int64_t digest(const std::vector<Span>& shards) {
  uint64_t all = 0;
  for (const auto& [first, count] : shards) all = dltrain::digest({first, count}, all);
  return static_cast<int64_t>(all | 1);
}

Piece Piece::part(int64_t parts, int64_t part) const {
  Piece out = *this;
  if (owner >= 0) {
    if (part != owner) out.span.count = 0;
    return out;
  }
  const auto border = [&](int64_t i) {
    const int64_t blocks = ceil_div(span.count, grain);
    return std::min(span.count, (blocks * i + turn % parts) / parts * grain);
  };
  out.span = {span.first + border(part), border(part + 1) - border(part)};
  out.number += border(part);
  return out;
}

std::vector<std::vector<Piece>> cut_evenly(int64_t numel, const Codec& codec, int segments) {
  segments = static_cast<int>(std::clamp<int64_t>(ceil_div(numel, codec.alignment), 1, segments));
  const Piece whole = even_piece({0, numel}, codec);
  std::vector<std::vector<Piece>> out;
  for (int segment = 0; segment < segments; ++segment) out.push_back({whole.part(segments, segment)});
  return out;
}

std::vector<std::vector<Piece>> cut_in_shards(const std::vector<Span>& shards, const Codec& codec, int segments) {
  std::vector<std::vector<Piece>> out;
  int64_t number = 0;
  for (size_t owner = 0; owner < shards.size(); ++owner) {
    const auto cut = cut_evenly(shards[owner].count, codec, segments);
    out.resize(std::max(out.size(), cut.size()));
    for (size_t segment = 0; segment < cut.size(); ++segment) {
      Piece& piece = out[segment].emplace_back(cut[segment].front());
      piece.span.first += shards[owner].first;
      piece.number += number;
      piece.owner = static_cast<int64_t>(owner);
    }
    number += (shards[owner].count + 3) / 4 * 4;
  }
  return out;
}

std::vector<std::vector<Piece>> cut_by_region(const Layout& layout, int segments) {
  // Elements of a piece, so that one large region can fill several segments. What has an owner is not divided into chunks.
  constexpr int64_t most_divided = 1 << 19, most_owned = 1 << 16;
  constexpr int64_t whole = 4096;            // a piece of up to this many elements is not divided into chunks
  std::map<int64_t, int64_t> totals, bytes;  // by owner
  for (const Region& region : layout) totals[region.owner] += region.codec->bytes(region.span.count);
  std::vector<std::vector<Piece>> out(segments);
  for (const Region& region : layout) {
    const int64_t total = std::max<int64_t>(totals[region.owner], 1);
    int64_t& before = bytes[region.owner];
    const int64_t most = region.owner < 0 ? most_divided : most_owned;
    for (int64_t first = 0; first < region.span.count; first += most) {
      const int64_t count = std::min(most, region.span.count - first), number = region.number + first;
      const Span span{region.span.first + first, count};
      const int64_t grain = count <= whole ? count : region.codec->alignment;
      out[before * segments / total].push_back({{span, region.codec, number, region.owner}, grain, turn_of(number)});
      before += region.codec->bytes(count);
    }
  }
  std::erase_if(out, [](const std::vector<Piece>& pieces) { return pieces.empty(); });
  if (out.empty()) out.emplace_back();
  return out;
}

std::vector<Span> shards_of(int64_t numel, int owners, int ranks) {
  std::vector<Span> shards;
  for (int rank = 0; rank < ranks; ++rank) shards.push_back(shard(numel, owners, rank));
  return shards;
}

Span shard(int64_t numel, int owners, int rank) {
  return rank < owners ? even_piece({0, numel}, find_codec("raw")).part(owners, rank).span : Span{numel, 0};
}

std::vector<Span> equal_shards(int64_t numel, int ranks) {
  std::vector<Span> shards;
  for (int rank = 0; rank < ranks; ++rank) shards.push_back({numel / ranks * rank, numel / ranks});
  return shards;
}

}  // namespace dltrain::comm
