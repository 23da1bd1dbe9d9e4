#include "comm/plan/verify.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "core/check.h"

namespace dltrain::comm {

namespace {

template <class... Parts>
[[noreturn]] void broken(const char* rule, const Parts&... parts) {
  throw BrokenPlan(text(rule, ": ", parts...));
}

// The ranks whose contributions are in a value.
class RankSet {
 public:
  explicit RankSet(int world_size) : words_((world_size + 63) / 64) {}
  RankSet(int world_size, int rank) : RankSet(world_size) { words_[rank / 64] |= uint64_t{1} << (rank % 64); }

  bool has(int rank) const { return words_[rank / 64] >> (rank % 64) & 1; }

  // Adds the ranks of the other set. Returns a rank that was in both, if there is one.
  std::optional<int> merge(const RankSet& other) {
    for (size_t i = 0; i < words_.size(); ++i) {
      if (const uint64_t both = words_[i] & other.words_[i]) return static_cast<int>(i * 64) + __builtin_ctzll(both);
      words_[i] |= other.words_[i];
    }
    return std::nullopt;
  }

 private:
  std::vector<uint64_t> words_;
};

// Two values with the same expression have the same bits: they have the same operands in the same order (of two operands, in any order).
using Expression = uint64_t;

Expression hash(const std::vector<Expression>& parts) {
  Expression out = 0x9e3779b97f4a7c15u * parts.size();
  for (Expression part : parts) {
    out = (out ^ part) * 0xff51afd7ed558ccdu;
    out ^= out >> 32;
  }
  return out;
}

struct Value {
  Expression expression;
  RankSet counts;
  bool final = false;
  bool there = true;  // false: the rank has nothing of the chunk yet
};

struct Held {
  Value value;
  int encoded_in = -1;     // the round in which it was encoded last; -1: in none
  Expression encoded = 0;  // what was encoded in that round
};

struct InFlight {
  Op op;
  Chunks chunks;
  std::vector<Value> values;
};

class Proof {
 public:
  explicit Proof(const std::vector<Plan>& plans)
      : plans_(plans),
        collective_(plans[0].collective),
        root_(plans[0].root),
        world_size_(static_cast<int>(plans.size())),
        exact_(std::all_of(plans.begin(), plans.end(), [](const Plan& plan) { return plan.exact; })) {
    constexpr int64_t most = 1 << 22;  // a few GiB
    check(int64_t{plans[0].chunks} * world_size_ <= most, "plans: expected at most ", most, " chunks on all ranks, got ", plans[0].chunks,
          " on each of ", world_size_);
    for (int rank = 0; rank < world_size_; ++rank) {
      const Plan& plan = plans[rank];
      check(plan.chunks >= 1, "plans[", rank, "]: expected at least 1 chunk, got ", plan.chunks);
      check(plan.rank == rank && plan.world_size == world_size_ && plan.chunks == plans[0].chunks, "plans[", rank, "]: expected rank ",
            rank, " of ", world_size_, " over ", plans[0].chunks, " chunks, got rank ", plan.rank, " of ", plan.world_size, " over ",
            plan.chunks);
      check(!has_owners(collective_) || plan.chunks == world_size_, "plans[", rank, "]: expected a chunk for each of ", world_size_,
            " ranks, got ", plan.chunks);
      check(plan.collective == collective_ && plan.root == root_, "plans[", rank, "]: expected ", name(collective_), " with root ", root_,
            ", got ", name(plan.collective), " with root ", plan.root);
      auto& chunks = held_.emplace_back();
      for (int chunk = 0; chunk < plan.chunks; ++chunk) {
        const bool there = has_part(rank, chunk);
        chunks.push_back(
            {{hash({static_cast<Expression>(rank) + 1}), there ? RankSet(world_size_, rank) : RankSet(world_size_), false, there}});
      }
      rounds_ = std::max(rounds_, plan.rounds.size());
    }
  }

  void run() {
    for (round_ = 0; round_ < static_cast<int>(rounds_); ++round_) {
      for (const Plan& plan : plans_) send(plan);
      for (const Plan& plan : plans_) receive(plan);
      for (const auto& [ends, messages] : in_flight_) {
        if (!messages.empty()) {
          broken("R1", "round ", round_, ": rank ", ends.first, " sends ", describe(messages[0].op, messages[0].chunks), " to rank ",
                 ends.second, ", which does not receive it");
        }
      }
      in_flight_.clear();
    }
    finish();
  }

 private:
  // Whether the rank has a part of the chunk before the first round.
  bool has_part(int rank, int chunk) const {
    return adds_up(collective_) || rank == (collective_ == Collective::broadcast ? root_ : chunk);
  }
  // Whether the rank is to have the chunk after the last round.
  bool is_to_have(int rank, int chunk) const {
    switch (collective_) {
      case Collective::reduce_scatter: return rank == chunk;
      case Collective::reduce: return rank == root_;
      default: return true;
    }
  }
  // Whether the sum of the chunk stays on the rank, which then need not encode its part.
  bool may_keep(int rank, int chunk) const {
    return collective_ != Collective::all_reduce && adds_up(collective_) && is_to_have(rank, chunk);
  }

  // A rank that has a part of the chunk, but whose contribution is not in the value.
  std::optional<int> missing(const Value& value, int chunk) const {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (has_part(rank, chunk) && !value.counts.has(rank)) return rank;
    }
    return std::nullopt;
  }

  static std::string describe(Op op, const Chunks& chunks) {
    return text(name(op), " of chunks ", chunks.begin, " to ", int64_t{chunks.end} - 1);
  }

  const Round* round_of(const Plan& plan) const { return round_ < static_cast<int>(plan.rounds.size()) ? &plan.rounds[round_] : nullptr; }

  void check_step(const Plan& plan, const Step& step) const {
    const bool chunks_fit = 0 <= step.chunks.begin && step.chunks.begin < step.chunks.end && step.chunks.end <= plan.chunks;
    if (!chunks_fit) broken("R1", "round ", round_, ": rank ", plan.rank, " names ", describe(step.op, step.chunks), " of ", plan.chunks);
    const bool peer_fits = step.op == Op::finalize || (0 <= step.peer && step.peer < world_size_ && step.peer != plan.rank);
    if (!peer_fits) broken("R1", "round ", round_, ": rank ", plan.rank, " names rank ", step.peer, " of ", world_size_, " as its peer");
  }

  void encode(int rank, int chunk) {
    Held& held = held_[rank][chunk];
    if (!held.value.there) broken("R4", "round ", round_, ": rank ", rank, " encodes chunk ", chunk, " before it has any of it");
    if (!exact_ && held.encoded_in >= 0 && held.encoded_in != round_) {
      broken("R4", "round ", round_, ": rank ", rank, " encodes chunk ", chunk, " a second time, the first was in round ", held.encoded_in);
    }
    held.encoded_in = round_;
    held.encoded = held.value.expression;
  }

  void finalize(int rank, int chunk) {
    Value& value = held_[rank][chunk].value;
    if (value.final) broken("R3", "round ", round_, ": rank ", rank, " finalizes chunk ", chunk, ", which is final already");
    if (const auto rank_missing = missing(value, chunk)) {
      broken("R2", "round ", round_, ": rank ", rank, " finalizes chunk ", chunk, " without the contribution of rank ", *rank_missing);
    }
    encode(rank, chunk);
    if (!exact_) value.expression = hash({value.expression, static_cast<Expression>(rank)});
    value.final = true;
  }

  void send(const Plan& plan) {
    const Round* round = round_of(plan);
    if (!round) return;
    for (const Step& step : *round) {
      check_step(plan, step);
      if (step.op != Op::finalize) continue;
      for (int chunk = step.chunks.begin; chunk < step.chunks.end; ++chunk) finalize(plan.rank, chunk);
    }
    for (const Step& step : *round) {
      if (!sends(step.op)) continue;
      InFlight message{step.op, step.chunks, {}};
      for (int chunk = step.chunks.begin; chunk < step.chunks.end; ++chunk) {
        const Value& value = held_[plan.rank][chunk].value;
        if (step.op == Op::send_final && !value.final) {
          broken("R4", "round ", round_, ": rank ", plan.rank, " sends chunk ", chunk, " as final before it has its final bytes");
        }
        if (step.op == Op::send_partial) {
          if (value.final) broken("R4", "round ", round_, ": rank ", plan.rank, " sends chunk ", chunk, " as partial, but it is final");
          encode(plan.rank, chunk);
        }
        message.values.push_back(value);
      }
      in_flight_[{plan.rank, step.peer}].push_back(std::move(message));
    }
  }

  InFlight arrival(const Plan& plan, const Step& step) {
    const Op sent = step.op == Op::recv_reduce ? Op::send_partial : Op::send_final;
    auto& queue = in_flight_[{step.peer, plan.rank}];
    if (queue.empty() || queue.front().op != sent || queue.front().chunks != step.chunks) {
      broken("R1", "round ", round_, ": rank ", plan.rank, " expects ", describe(sent, step.chunks), " from rank ", step.peer,
             ", which sends ", queue.empty() ? "nothing more" : describe(queue.front().op, queue.front().chunks));
    }
    InFlight message = std::move(queue.front());
    queue.erase(queue.begin());
    return message;
  }

  void receive(const Plan& plan) {
    const Round* round = round_of(plan);
    if (!round) return;
    auto& held = held_[plan.rank];
    std::map<int, std::map<int, Value>> partials;  // chunk -> rank -> its partial
    for (const Step& step : *round) {
      if (!receives(step.op)) continue;
      InFlight message = arrival(plan, step);
      for (int chunk = step.chunks.begin; chunk < step.chunks.end; ++chunk) {
        if (held[chunk].value.final) {
          broken("R3", "round ", round_, ": rank ", plan.rank, " receives chunk ", chunk, ", which it holds as final already");
        }
        Value& value = message.values[chunk - step.chunks.begin];
        if (step.op == Op::recv_final) {
          if (held[chunk].encoded_in == round_) {
            broken("R4", "round ", round_, ": rank ", plan.rank, " receives chunk ", chunk, " into the slot that it is still sending");
          }
          // Otherwise a part would be lost, and the receive could overwrite a slot that is still being sent.
          if (held[chunk].encoded_in >= 0 && held[chunk].encoded != held[chunk].value.expression) {
            broken("R4", "round ", round_, ": rank ", plan.rank, " overwrites chunk ", chunk,
                   ", into which it has folded a part that it has not sent");
          }
          held[chunk].value = std::move(value);
        } else if (!partials[chunk].emplace(step.peer, std::move(value)).second) {
          broken("R2", "round ", round_, ": rank ", plan.rank, " folds rank ", step.peer, "'s chunk ", chunk, " twice");
        }
      }
    }
    for (auto& [chunk, values] : partials) fold(plan.rank, chunk, values);
  }

  // Folds in rank order, with this rank's own value at its own position.
  void fold(int rank, int chunk, std::map<int, Value>& values) {
    Value& mine = held_[rank][chunk].value;
    RankSet counts = mine.counts;
    for (const auto& [peer, value] : values) {
      if (const auto twice = counts.merge(value.counts)) {
        broken("R2", "round ", round_, ": rank ", rank, "'s chunk ", chunk, " counts the contribution of rank ", *twice, " twice");
      }
    }
    if (mine.there) values.emplace(rank, mine);
    std::vector<Expression> operands;
    for (const auto& [peer, value] : values) operands.push_back(value.expression);
    if (operands.size() == 2) std::sort(operands.begin(), operands.end());
    mine.expression = hash(operands);
    mine.counts = std::move(counts);
    mine.there = true;
  }

  void finish() const {
    std::vector<int> holders(plans_[0].chunks, -1);  // the first rank that is to have the chunk
    for (int rank = 0; rank < world_size_; ++rank) {
      for (int chunk = 0; chunk < plans_[rank].chunks; ++chunk) {
        const Held& held = held_[rank][chunk];
        if (is_to_have(rank, chunk)) {
          if (const auto rank_missing = missing(held.value, chunk)) {
            broken("R2", "at the end rank ", rank, "'s chunk ", chunk, " lacks the contribution of rank ", *rank_missing);
          }
          if (holders[chunk] < 0) holders[chunk] = rank;
          if (held.value.expression != held_[holders[chunk]][chunk].value.expression) {
            broken("R3", "at the end ranks ", holders[chunk], " and ", rank, " hold different bits for chunk ", chunk);
          }
        }
        if (held.encoded_in < 0 && has_part(rank, chunk) && !may_keep(rank, chunk)) {
          broken("R4", "rank ", rank, " never encodes chunk ", chunk);
        }
      }
    }
  }

  const std::vector<Plan>& plans_;
  const Collective collective_;
  const int root_, world_size_;
  const bool exact_;  // encoding changes no value, so it may be done more than once
  size_t rounds_ = 0;
  int round_ = 0;
  std::vector<std::vector<Held>> held_;                             // rank, chunk
  std::map<std::pair<int, int>, std::vector<InFlight>> in_flight_;  // (from, to)
};

}  // namespace

void verify(const std::vector<Plan>& plans) {
  check(!plans.empty(), "plans: expected one for each rank, got none");
  Proof(plans).run();
}

}  // namespace dltrain::comm
