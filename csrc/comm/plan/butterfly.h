#pragma once

// Both butterfly plans use this. The indices of partners differ in one bit, so only 2^L ranks are active, the largest power of two. Of the
// first 2(p - 2^L) ranks the even ones are inactive: they send their part to their neighbour first, and receive the result from it last.

#include <bit>

#include "comm/plan/plan.h"

namespace dltrain::comm {

struct Butterfly {
  int rank, inactive, active;  // p = active + inactive; active is a power of two

  Butterfly(int rank, int p) : rank(rank), inactive(p - static_cast<int>(std::bit_floor(static_cast<unsigned>(p)))), active(p - inactive) {}

  bool paired() const { return rank < 2 * inactive; }
  bool is_inactive() const { return paired() && rank % 2 == 0; }
  bool sends_result() const { return paired() && rank % 2 == 1; }
  int neighbour() const { return rank ^ 1; }
  int index() const { return paired() ? rank / 2 : rank - inactive; }
  int partner(int distance) const {
    const int other = index() ^ distance;
    return other < inactive ? 2 * other + 1 : other + inactive;
  }

  // The whole vector is sent, for two more rounds. If pairs split it in halves, a rank would have to take back what it has sent.
  void fold_in(Plan& plan) const {
    if (inactive == 0) return;
    plan.rounds.emplace_back();
    if (paired()) plan.rounds.back().push_back({is_inactive() ? Op::send_partial : Op::recv_reduce, neighbour(), {0, plan.chunks}});
  }
  void fold_out(Plan& plan) const {
    if (inactive == 0) return;
    plan.rounds.emplace_back();
    if (paired()) plan.rounds.back().push_back({is_inactive() ? Op::recv_final : Op::send_final, neighbour(), {0, plan.chunks}});
  }
};

}  // namespace dltrain::comm
