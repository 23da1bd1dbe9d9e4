#include "comm/program.h"

#include <algorithm>
#include <map>
#include <utility>

namespace dltrain::comm {

namespace {

// The part-th of `parts` equal stretches of span, cut at multiples of block.
Span cut(const Span& span, int64_t block, int64_t parts, int64_t part) {
  const int64_t blocks = (span.count + block - 1) / block;
  const int64_t begin = std::min(span.count, blocks * part / parts * block);
  const int64_t end = std::min(span.count, blocks * (part + 1) / parts * block);
  return {span.first + begin, end - begin};
}

// Places of equal size; one given back is the next one taken, since it is still in the cache.
class Inbox {
 public:
  int64_t place_size = 0;

  int64_t take() {
    if (free_.empty()) return place_size * places_++;
    const int64_t place = free_.back();
    free_.pop_back();
    return place;
  }
  void give_back(int64_t place) { free_.push_back(place); }
  int64_t size() const { return place_size * places_; }

 private:
  int64_t places_ = 0;
  std::vector<int64_t> free_;
};

struct Chunk {
  Span span;
  bool used = false;  // my contribution has been scaled
};

struct Partial {  // a message of recv_reduce
  int peer;
  Chunks chunks;
  int64_t place;
};

struct Segment {
  std::vector<Chunk> chunks;
  std::vector<Partial> arriving, arrived;  // in this round, in the one before

  Span span_of(const Chunks& range) const {
    const Span &first = chunks[range.begin].span, &last = chunks[range.end - 1].span;
    return {first.first, last.first + last.count - first.first};
  }
};

class Lowering {
 public:
  Lowering(const Plan& plan, const Codec& codec, int64_t numel, int segments) : plan_(plan), rounds_(static_cast<int>(plan.rounds.size())) {
    for (int s = 0; s < segments; ++s) {
      const Span span = cut({0, numel}, codec.alignment, segments, s);
      Segment& segment = segments_.emplace_back();
      for (int chunk = 0; chunk < plan.chunks; ++chunk) segment.chunks.push_back({cut(span, codec.alignment, plan.chunks, chunk)});
      for (const Round& round : plan.rounds) {
        for (const Step& step : round) {
          if (step.op == Op::recv_reduce) inbox_.place_size = std::max(inbox_.place_size, segment.span_of(step.chunks).count);
        }
      }
    }
    inbox_.place_size = (inbox_.place_size + codec.alignment - 1) / codec.alignment * codec.alignment;
  }

  Program run() {
    // A segment passes one tick beyond its last round, in which it folds what that round brought.
    Program program;
    program.algorithm = plan_.algorithm;
    program.rounds = rounds_;
    program.segments = static_cast<int>(segments_.size());
    program.first = lower_receives(0, 0);
    program.ticks.resize(rounds_ + segments_.size());
    for (int tick = 0; tick < static_cast<int>(program.ticks.size()); ++tick) {
      for (int segment = 0; segment < program.segments; ++segment) {
        if (const int round = tick - segment; 0 <= round && round <= rounds_) {
          program.ticks[tick].push_back(lower_part(segment, round));
          for (const Transfer& send : program.ticks[tick].back().sends) program.sent += send.span.count;
        }
      }
    }
    program.inbox = inbox_.size();
    return program;
  }

 private:
  std::vector<Transfer> lower_receives(int index, int round) {
    std::vector<Transfer> out;
    if (index == static_cast<int>(segments_.size()) || round >= rounds_) return out;
    Segment& segment = segments_[index];
    for (const Step& step : plan_.rounds[round]) {
      const Span span = segment.span_of(step.chunks);
      if (!receives(step.op) || span.count == 0) continue;
      if (step.op == Op::recv_final) {
        out.push_back({step.peer, round, index, false, span});
      } else {
        segment.arriving.push_back({step.peer, step.chunks, inbox_.take()});
        out.push_back({step.peer, round, index, true, {segment.arriving.back().place, span.count}});
      }
    }
    return out;
  }

  Part lower_part(int index, int round) {
    Segment& segment = segments_[index];
    Part part{index, {}, {}, {}};
    fold_arrived(segment, part);
    if (round == rounds_) return part;
    for (const Step& step : plan_.rounds[round]) {
      if (receives(step.op)) continue;
      for (int chunk = step.chunks.begin; chunk < step.chunks.end; ++chunk) add_fold(segment.chunks[chunk], {}, 0, part);
      const Span span = segment.span_of(step.chunks);
      if (sends(step.op) && span.count > 0) part.sends.push_back({step.peer, round, index, false, span});
    }
    // In the order in which the peers send: by tick, then by segment. A segment's first round follows the one of the segment before it.
    part.ahead = lower_receives(index, round + 1);
    if (round == 0) {
      const auto next = lower_receives(index + 1, 0);
      part.ahead.insert(part.ahead.end(), next.begin(), next.end());
    }
    return part;
  }

  void fold_arrived(Segment& segment, Part& part) {
    std::map<int, std::map<int, int64_t>> operands;  // chunk -> peer -> where in the inbox
    for (const Partial& partial : segment.arrived) {
      const int64_t first = segment.span_of(partial.chunks).first;
      for (int chunk = partial.chunks.begin; chunk < partial.chunks.end; ++chunk) {
        operands[chunk][partial.peer] = partial.place + segment.chunks[chunk].span.first - first;
      }
      inbox_.give_back(partial.place);
    }
    segment.arrived = std::exchange(segment.arriving, {});
    for (const auto& [chunk, by_peer] : operands) {
      std::vector<int64_t> inboxes;
      int own_place = 0;
      for (const auto& [peer, inbox] : by_peer) {
        inboxes.push_back(inbox);
        own_place += peer < plan_.rank;
      }
      add_fold(segment.chunks[chunk], std::move(inboxes), own_place, part);
    }
  }

  static void add_fold(Chunk& chunk, std::vector<int64_t> inboxes, int own_place, Part& part) {
    const bool scales = !std::exchange(chunk.used, true);
    if (chunk.span.count > 0 && (scales || !inboxes.empty())) part.folds.push_back({chunk.span, std::move(inboxes), own_place, scales});
  }

  const Plan& plan_;
  const int rounds_;
  std::vector<Segment> segments_;
  Inbox inbox_;
};

}  // namespace

Program lower(const Plan& plan, const Codec& codec, int64_t numel, int segments) { return Lowering(plan, codec, numel, segments).run(); }

}  // namespace dltrain::comm
