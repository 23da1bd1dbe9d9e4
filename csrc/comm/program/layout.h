#pragma once

// What a call reduces, and how it is divided. A single tensor is divided evenly into segments, and each segment into chunks. In a DDP
// bucket each parameter is divided on its own, and a segment consists of the pieces of some parameters. So the result of a gradient depends
// only on its parameter, and not on what else is in the bucket.
//
// If chunk r belongs to rank r, each rank's shard is divided into segments like a tensor, and chunk r of a segment is a part of shard r.
// The regions of a layout may have owners, too: then chunk r consists of regions that belong to rank r.
//
//   one tensor    |  segment 0   |  segment 1   |        two regions   | region 0  |re| region 1, a | region 1, b |
//   chunks        | 0 | 1 | 2 | 3| 0 | 1 | 2 | 3|        chunks        |0 |1 |2 |3 |2 |0 | 1 | 2 |3 |0 | 1 | 2 | 3|

#include <compare>
#include <cstdint>
#include <vector>

#include "core/span.h"
#include "kernels/codec.h"

namespace dltrain::comm {

// A contiguous part of the tensor that has a codec and blocks of its own: the gradient of a parameter.
struct Region {
  Span span;
  const Codec* codec;
  int64_t number = 0;  // the index of its first element among the elements of all regions of all buckets; a multiple of 4
  int64_t owner = -1;  // if not -1, the chunk that gets the whole region
  auto operator<=>(const Region&) const = default;
};

using Layout = std::vector<Region>;  // in ascending order, without overlaps

// The index of the region that has the element.
size_t region_at(const Layout& layout, int64_t element);

// The parts of the regions that are within a span, with positions relative to the first element of the span.
Layout within(const Layout& layout, const Span& span);

// The number of message bytes that it takes to send the whole layout once.
int64_t message_bytes(const Layout& layout);

// A hash of the layout or of the shards, which is never 0. Different ones almost always have different hashes.
int64_t digest(const Layout& layout);
int64_t digest(const std::vector<Span>& shards);

// A region, or a part of one, that is divided into the chunks of a segment.
struct Piece : Region {
  int64_t grain;      // the granularity in elements, one block or more: chunks begin at multiples of it
  uint32_t turn = 0;  // selects the chunks that get the remainder

  Piece part(int64_t parts, int64_t part) const;
};

// The pieces of each segment.
std::vector<std::vector<Piece>> cut_evenly(int64_t numel, const Codec& codec, int segments);
std::vector<std::vector<Piece>> cut_by_region(const Layout& layout, int segments);
std::vector<std::vector<Piece>> cut_in_shards(const std::vector<Span>& shards, const Codec& codec, int segments);

// The shard of each rank. The first `owners` ranks have the chunks of a raw fp32 tensor in one segment, the other shards are empty.
std::vector<Span> shards_of(int64_t numel, int owners, int ranks);
Span shard(int64_t numel, int owners, int rank);
// Shards of equal size; numel must be a multiple of the number of ranks.
std::vector<Span> equal_shards(int64_t numel, int ranks);

}  // namespace dltrain::comm
