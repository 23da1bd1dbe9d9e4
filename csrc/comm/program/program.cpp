#include "comm/program/program.h"

#include <algorithm>
#include <map>
#include <ranges>
#include <utility>

#include "core/cache_line.h"

namespace dltrain::comm {

namespace {

using Area = Location::Area;

constexpr int64_t vector = 16;  // bytes

int64_t aligned(int64_t bytes, int64_t alignment = cache_line) { return (bytes + alignment - 1) / alignment * alignment; }

// Consists of slots of equal size. Each holds one message until all chunks of the message have been used. The slot that was freed last is
// used first, because it is still in the cache.
class ReceiveBuffer {
 public:
  int64_t slot_size = 0;

  int64_t take(int chunks) {
    if (free_.empty()) {
      free_.push_back(slot_size * static_cast<int64_t>(unused_chunks_.size()));
      unused_chunks_.push_back(0);
    }
    const int64_t offset = free_.back();
    free_.pop_back();
    unused_chunks_[offset / slot_size] = chunks;
    return offset;
  }
  void use_chunk(int64_t offset) {
    const int64_t index = offset / slot_size;
    if (--unused_chunks_[index] == 0) free_.push_back(index * slot_size);
  }
  int64_t size() const { return slot_size * static_cast<int64_t>(unused_chunks_.size()); }

 private:
  std::vector<int> unused_chunks_;  // of the message in each slot
  std::vector<int64_t> free_;
};

struct Slot {  // of a chunk
  std::vector<Region> regions;
  std::vector<int64_t> offsets;  // of the regions' messages within the chunk's message
  int64_t slot = 0, bytes = 0;
};

// The slots of each segment. bytes: set to the size of all slots together.
std::vector<std::vector<Slot>> slots_of(int chunks, const std::vector<std::vector<Piece>>& segments, bool in_place, int64_t& bytes) {
  std::vector<std::vector<Slot>> out;
  bytes = 0;
  for (const std::vector<Piece>& pieces : segments) {
    auto& slots = out.emplace_back();
    // The chunks of a single piece need no padding: the piece is divided where messages may begin.
    const int64_t alignment = !in_place && pieces.size() > 1 ? vector : 1;
    for (int c = 0; c < chunks; ++c) {
      Slot& slot = slots.emplace_back();
      slot.slot = aligned(bytes, alignment);
      for (const Piece& piece : pieces) {
        const Piece part = piece.part(chunks, c);
        if (part.span.count == 0) continue;
        if (in_place) slot.slot = part.codec->bytes(part.span.first);
        const int64_t offset = aligned(slot.bytes, alignment);
        slot.regions.push_back(part);
        slot.offsets.push_back(offset);
        slot.bytes = offset + part.codec->bytes(part.span.count);
      }
      bytes = slot.slot + slot.bytes;
    }
    if (!in_place) bytes = aligned(bytes);
  }
  return out;
}

struct Chunk : Slot {
  std::vector<Location> received;  // not yet added up
  int own_position = 0;
  int encoded_in = -1;  // the round in which the chunk was encoded; from then on the message in the slot contains this rank's contribution
  bool final = false;
};

struct Partial {  // a message of recv_reduce
  int peer;
  Chunks chunks;
  int64_t offset;
};

struct Segment {
  std::vector<Chunk> chunks;
  std::vector<Partial> arriving, arrived;  // in this round; in the previous round
  std::vector<Chunks> final_arriving, final_arrived;

  int64_t bytes_of(const Chunks& range) const {
    const Chunk &first = chunks[range.begin], &last = chunks[range.end - 1];
    return last.slot + last.bytes - first.slot;
  }
  int filled(const Chunks& range) const {
    return static_cast<int>(
        std::count_if(chunks.begin() + range.begin, chunks.begin() + range.end, [](const Chunk& chunk) { return chunk.bytes > 0; }));
  }
};

class Lowering {
 public:
  Lowering(const Plan& plan, const std::vector<std::vector<Piece>>& segments, Result result)
      : plan_(plan), rounds_(static_cast<int>(plan.rounds.size())), in_place_(result == Result::values_in_place) {
    program_.algorithm = index_of(plan.collective, plan.algorithm);
    program_.result = result;
    program_.rounds = rounds_;
    program_.segments = static_cast<int>(segments.size());
    for (std::vector<Slot>& slots : slots_of(plan.chunks, segments, in_place_, program_.slots)) {
      Segment& segment = segments_.emplace_back();
      for (Slot& slot : slots) segment.chunks.emplace_back().Slot::operator=(std::move(slot));
      for (const Round& round : plan.rounds) {
        for (const Step& step : round) {
          if (step.op == Op::recv_reduce)
            receive_buffer_.slot_size = std::max(receive_buffer_.slot_size, aligned(segment.bytes_of(step.chunks)));
        }
      }
    }
  }

  Program run() {
    // A segment has one tick after its last round, in which it uses the messages of that round.
    program_.first = lower_receives(0, 0);
    program_.ticks.resize(rounds_ + segments_.size());
    for (int tick = 0; tick < static_cast<int>(program_.ticks.size()); ++tick) {
      for (int segment = std::max(0, tick - rounds_); segment <= std::min(tick, program_.segments - 1); ++segment) {
        program_.ticks[tick].push_back(lower_part(segment, tick - segment));
        for (const Transfer& send : program_.ticks[tick].back().sends) program_.sent += send.bytes;
      }
    }
    program_.receive_buffer = receive_buffer_.size();
    program_.receive_slot = receive_buffer_.slot_size;
    if (in_place_) program_.slots = 0;
    return std::move(program_);
  }

 private:
  std::vector<Transfer> lower_receives(int index, int round) {
    std::vector<Transfer> out;
    if (index == static_cast<int>(segments_.size()) || round >= rounds_) return out;
    Segment& segment = segments_[index];
    for (const Step& step : plan_.rounds[round]) {
      const int64_t bytes = segment.bytes_of(step.chunks);
      if (!receives(step.op) || bytes == 0) continue;
      if (step.op == Op::recv_final) {
        segment.final_arriving.push_back(step.chunks);
        out.push_back({step.peer, round, index, {Area::slots, segment.chunks[step.chunks.begin].slot}, bytes});
      } else {
        const Location location{Area::receive_buffer, receive_buffer_.take(segment.filled(step.chunks))};
        segment.arriving.push_back({step.peer, step.chunks, location.offset});
        out.push_back({step.peer, round, index, location, bytes, uses_up(step.chunks, round + 1)});
      }
    }
    return out;
  }

  // Whether this rank adds up all that it has received of these chunks in a round.
  bool uses_up(const Chunks& range, int round) const {
    if (round == rounds_) return true;
    return std::ranges::all_of(std::views::iota(range.begin, range.end), [&](int chunk) {
      return std::ranges::any_of(plan_.rounds[round], [&](const Step& step) {
        return !receives(step.op) && step.op != Op::send_final && step.chunks.begin <= chunk && chunk < step.chunks.end;
      });
    });
  }

  SegmentWork lower_part(int index, int round) {
    Segment& segment = segments_[index];
    SegmentWork part{index, {}, {}, {}, {}};
    take_arrived(segment, part);
    if (round == rounds_) {
      for (Chunk& chunk : segment.chunks) {
        const bool given_away = chunk.encoded_in >= 0 && chunk.received.empty();  // in a reduce-scatter or reduce, to another rank
        const bool encodes = program_.result == Result::message;  // of a single rank: with others the message is final by now
        if (!chunk.final && !given_away) sum(chunk, encodes, !encodes, part);
      }
      return part;
    }
    for (const Step& step : plan_.rounds[round]) {
      if (receives(step.op)) continue;
      for (int c = step.chunks.begin; c < step.chunks.end; ++c) {
        Chunk& chunk = segment.chunks[c];
        if (step.op != Op::send_final && chunk.encoded_in != round)
          sum(chunk, true, step.op == Op::finalize && program_.result != Result::message, part);
        if (step.op != Op::send_final) chunk.encoded_in = round;
        chunk.final |= step.op == Op::finalize;
      }
      const int64_t bytes = segment.bytes_of(step.chunks);
      if (!sends(step.op) || bytes == 0) continue;
      part.sends.push_back({step.peer, round, index, {Area::slots, segment.chunks[step.chunks.begin].slot}, bytes});
    }
    // Receives are in the order in which the peers send: by tick, then by segment. The next segment begins one tick after this one.
    part.ahead = lower_receives(index, round + 1);
    if (round == 0) {
      const auto next = lower_receives(index + 1, 0);
      part.ahead.insert(part.ahead.end(), next.begin(), next.end());
    }
    return part;
  }

  void take_arrived(Segment& segment, SegmentWork& part) {
    std::map<int, std::map<int, Location>> partials;  // chunk -> peer -> its message
    for (const Partial& partial : segment.arrived) {
      const int64_t first = segment.chunks[partial.chunks.begin].slot;
      for (int c = partial.chunks.begin; c < partial.chunks.end; ++c) {
        const Chunk& chunk = segment.chunks[c];
        if (chunk.bytes > 0) partials[c][partial.peer] = {Area::receive_buffer, partial.offset + chunk.slot - first};
      }
    }
    segment.arrived = std::exchange(segment.arriving, {});
    // What arrived in earlier rounds counts as a part of this rank's own value: later messages are added before or after all of it.
    for (const auto& [c, by_peer] : partials) {
      Chunk& chunk = segment.chunks[c];
      std::vector<Location> lower, upper;
      for (const auto& [peer, location] : by_peer) (peer < plan_.rank ? lower : upper).push_back(location);
      chunk.own_position += static_cast<int>(lower.size());
      chunk.received.insert(chunk.received.begin(), lower.begin(), lower.end());
      chunk.received.insert(chunk.received.end(), upper.begin(), upper.end());
    }
    for (const Chunks& range : segment.final_arrived) {
      for (int c = range.begin; c < range.end; ++c) {
        Chunk& chunk = segment.chunks[c];
        chunk.final = true;
        if (program_.result != Result::values) continue;
        for (size_t i = 0; i < chunk.regions.size(); ++i) part.decodes.push_back({chunk.regions[i], chunk.slot + chunk.offsets[i]});
      }
    }
    segment.final_arrived = std::exchange(segment.final_arriving, {});
  }

  // Once the chunk has been encoded, the message in its slot is an operand instead of the own contribution, which it contains.
  void sum(Chunk& chunk, bool encodes, bool decodes, SegmentWork& part) {
    const bool own = chunk.encoded_in < 0;
    const int own_position = std::exchange(chunk.own_position, 0);
    std::vector<Location> received = std::exchange(chunk.received, {});
    if (chunk.bytes == 0) return;
    for (const Location& location : received) receive_buffer_.use_chunk(location.offset);
    if (!own) received.insert(received.begin() + own_position, {Area::slots, chunk.slot});
    for (size_t i = 0; i < chunk.regions.size(); ++i) {
      const int64_t offset = chunk.offsets[i], slot = encodes ? chunk.slot + offset : -1;
      std::vector<Location> messages = received;
      for (Location& message : messages) message.offset += offset;
      part.sums.push_back({chunk.regions[i], std::move(messages), own, own_position, slot, decodes && !(encodes && in_place_)});
    }
  }

  const Plan& plan_;
  const int rounds_;
  const bool in_place_;
  Program program_;
  std::vector<Segment> segments_;
  ReceiveBuffer receive_buffer_;
};

}  // namespace

Program lower(const Plan& plan, const std::vector<std::vector<Piece>>& segments, Result result) {
  return Lowering(plan, segments, result).run();
}

Encoded encoded(int chunks, const std::vector<std::vector<Piece>>& segments) {
  Encoded out;
  for (const std::vector<Slot>& slots : slots_of(chunks, segments, false, out.bytes)) {
    for (const Slot& slot : slots) {
      for (size_t i = 0; i < slot.regions.size(); ++i) out.parts.push_back({slot.regions[i], slot.slot + slot.offsets[i]});
    }
  }
  return out;
}

Program handshake_program(int rank, int world_size) {
  Program program;
  if (world_size == 1) return program;
  program.rounds = program.segments = 1;
  const Transfer to{(rank + 1) % world_size, 0, 0, {Area::receive_buffer, 0}, 0},
      from{(rank + world_size - 1) % world_size, 0, 0, {Area::receive_buffer, 0}, 0};
  program.first = {from};
  program.ticks = {{SegmentWork{0, {}, {to}, {}, {}}}, {SegmentWork{0, {}, {}, {}, {}}}};
  return program;
}

}  // namespace dltrain::comm
