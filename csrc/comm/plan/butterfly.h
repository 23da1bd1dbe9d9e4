#pragma once

// What the two butterflies share: partners are numbers that differ in one bit, so the ranks beyond a power of two stand aside. Of the first
// 2(p - 2^L) ranks the even ones give their part to their neighbour first, and get the result from it last.

#include <bit>

#include "comm/plan/plan.h"

namespace dltrain::comm {

struct Butterfly {
  int rank, beyond, active;  // p = active + beyond, active a power of two

  Butterfly(int rank, int p) : rank(rank), beyond(p - static_cast<int>(std::bit_floor(static_cast<unsigned>(p)))), active(p - beyond) {}

  bool paired() const { return rank < 2 * beyond; }
  bool stands_aside() const { return paired() && rank % 2 == 0; }
  bool sends_result() const { return paired() && rank % 2 == 1; }
  int neighbour() const { return rank ^ 1; }
  int number() const { return paired() ? rank / 2 : rank - beyond; }
  int partner(int distance) const {
    const int other = number() ^ distance;
    return other < beyond ? 2 * other + 1 : other + beyond;
  }

  void fold_in(Plan& plan) const {
    if (beyond == 0) return;
    plan.rounds.emplace_back();
    if (paired()) plan.rounds.back().push_back({stands_aside() ? Op::send_partial : Op::recv_reduce, neighbour(), {0, plan.chunks}});
  }
  void fold_out(Plan& plan) const {
    if (beyond == 0) return;
    plan.rounds.emplace_back();
    if (paired()) plan.rounds.back().push_back({stands_aside() ? Op::recv_final : Op::send_final, neighbour(), {0, plan.chunks}});
  }
};

}  // namespace dltrain::comm
