#include "comm/program/selection.h"

#include <algorithm>
#include <string_view>

#include "comm/plan/plan.h"

namespace dltrain::comm {

namespace {

constexpr int64_t kib = 1 << 10;

std::string_view plan_for(const std::string& algorithm, int world_size, int64_t nbytes, bool lossy) {
  const bool small = nbytes <= 64 * kib;
  if (algorithm == "butterfly") return !lossy && small ? "recursive_doubling" : "halving_doubling";
  if (algorithm != "auto") return algorithm;
  // Small messages need few rounds. Of the plans that do not send all data to all ranks, direct has the fewest. For large messages the ring
  // is faster, because at no time several ranks send to the same one.
  if (small && world_size == 2) return "oneshot";
  if (small && !lossy) return "recursive_doubling";
  return world_size > 2 && nbytes >= 8192 * kib ? "ring" : "direct";
}

// A tree sends few messages, direct few bytes on each link. The limit was measured on links of 1 Gbit/s with 3 to 8 ranks.
std::string_view rooted_plan_for(const std::string& algorithm, int world_size, int64_t wire_bytes) {
  if (algorithm != "auto") return algorithm;
  return world_size == 2 || wire_bytes <= 128 * kib ? "tree" : "direct";
}

// In an all-gather the ring encodes no more often than direct does, and at no time several ranks send to the same one.
std::string_view plan_with_owners(Collective collective, const std::string& algorithm, int world_size, int64_t nbytes) {
  if (algorithm != "auto") return algorithm;
  return collective == Collective::all_gather && world_size > 2 && nbytes >= 4096 * kib ? "ring" : "direct";
}

int pieces(int64_t bytes, int64_t size, int64_t most) { return static_cast<int>(std::clamp<int64_t>(bytes / size, 1, most)); }

// A few segments hide encoding behind sending; more only add messages. Lossless codecs have no encoding to hide. The sizes were measured on
// links of 1 Gbit/s, and over loopback, where sending needs the processor as well, so that each segment costs time.
int segments_for(int64_t wire_bytes, bool lossy, bool pipelined, int64_t segment_bytes) {
  if (segment_bytes > 0) return segments_of(wire_bytes, segment_bytes);
  if (pipelined) return pieces(wire_bytes, 1024 * kib, 16);
  return std::max(pieces(wire_bytes, 8192 * kib, 8), lossy ? pieces(wire_bytes, 640 * kib, 3) : 1);
}

}  // namespace

int segments_of(int64_t wire_bytes, int64_t segment_bytes) { return pieces(wire_bytes, segment_bytes, 256); }

Selection select(Collective collective, const std::string& algorithm, int segments, int world_size, int64_t numel, const Codec& codec,
                 int64_t wire_bytes, const Crossover* crossover, int64_t segment_bytes) {
  const int64_t nbytes = numel * static_cast<int64_t>(sizeof(float));
  const bool lossy = codec.is_lossy();
  const auto name = [&]() -> std::string_view {
    if (is_rooted(collective)) return rooted_plan_for(algorithm, world_size, wire_bytes);
    if (has_owners(collective)) return plan_with_owners(collective, algorithm, world_size, nbytes);
    if (crossover && algorithm == "auto") return crossover->plan_for(wire_bytes, lossy);
    return plan_for(algorithm, world_size, nbytes, lossy);
  };
  const int index = index_of(collective, name());
  return {index, segments ? segments : segments_for(wire_bytes, lossy, is_pipelined(index), segment_bytes)};
}

}  // namespace dltrain::comm
