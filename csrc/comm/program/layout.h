#pragma once

// What a call reduces, and how it is cut. A tensor as a whole is cut evenly, into segments and these into chunks. Of a DDP bucket the
// parameters are cut, each by itself, and segments are made of some of them: so what becomes of a parameter's gradient depends on that
// parameter alone, whatever else is in its bucket.
//
// Where chunk r is rank r's, each rank's share is cut as a tensor is, into segments, and a segment's chunk is a stretch of that.
//
//   one tensor    |  segment 0   |  segment 1   |        two regions   | region 0  |re| region 1, a | region 1, b |
//   chunks        | 0 | 1 | 2 | 3| 0 | 1 | 2 | 3|        chunks        |0 |1 |2 |3 |2 |0 | 1 | 2 |3 |0 | 1 | 2 | 3|

#include <compare>
#include <cstdint>
#include <vector>

#include "core/span.h"
#include "kernels/codec.h"

namespace dltrain::comm {

// A stretch of the tensor that has a codec, and blocks, of its own: the gradient of a parameter.
struct Region {
  Span span;
  const Codec* codec;
  int64_t number = 0;  // of its first element among those of all regions there are; a multiple of 4
  auto operator<=>(const Region&) const = default;
};

using Layout = std::vector<Region>;  // apart, in the order in which they lie

// What is left of the regions within a span, counted from its first element.
Layout within(const Layout& layout, const Span& span);

// Of messages: as many bytes as it takes to send all of it once.
int64_t message_bytes(const Layout& layout);

// Differs, as good as always, where layouts do, or shares; never 0.
int64_t digest(const Layout& layout);
int64_t digest(const std::vector<Span>& shards);

// A region, or a part of one, that is cut into a segment's chunks.
struct Piece : Region {
  int64_t grain;       // elements that stay together: one block or more
  uint32_t turn = 0;   // which chunks get what is left over
  int64_t owner = -1;  // not -1: this chunk gets all of it

  Piece part(int64_t parts, int64_t part) const;
};

// By segment.
std::vector<std::vector<Piece>> cut_evenly(int64_t numel, const Codec& codec, int segments);
std::vector<std::vector<Piece>> cut_by_region(const Layout& layout, int segments);
std::vector<std::vector<Piece>> cut_in_shards(const std::vector<Span>& shards, const Codec& codec, int segments);

// Shares of numel elements for so many ranks, of which the first `owners` get some: as the chunks of a tensor of raw fp32 in one segment.
std::vector<Span> shards_of(int64_t numel, int owners, int ranks);
Span shard(int64_t numel, int owners, int rank);
// As many for each; numel is a multiple of the ranks.
std::vector<Span> equal_shards(int64_t numel, int ranks);

}  // namespace dltrain::comm
