// Recursive doubling, the butterfly for small messages: all ranks exchange all they have with the rank at distance 1, 2, 4, ... For four:
//
//   round 0     0 ◄─► 1    2 ◄─► 3
//   round 1     0 ◄─► 2    1 ◄─► 3         now everybody has everything
//
// log2 p rounds, n log2 p bytes sent a rank: log2 p (alpha + n beta + n gamma). Beyond a power of two: 2 rounds more, 2n beta + n gamma.
// (Thakur, Rabenseifner & Gropp 2005.) Partners add the same two numbers, so all ranks hold the same bits; but each sum is made and encoded
// on several ranks and more than once, so it takes only codecs that lose nothing.

#include "comm/plan/butterfly.h"

namespace dltrain::comm {

Plan recursive_doubling(int rank, int p) {
  const Butterfly wing(rank, p);
  const Chunks all{0, 1};
  Plan plan{Collective::all_reduce, "recursive_doubling", rank, p, 1, 0, {}, true};
  wing.fold_in(plan);
  for (int distance = 1; distance < wing.active; distance *= 2) {
    plan.rounds.emplace_back();
    if (wing.stands_aside()) continue;
    plan.rounds.back() = {{Op::send_partial, wing.partner(distance), all}, {Op::recv_reduce, wing.partner(distance), all}};
  }
  wing.fold_out(plan);
  if (p == 1) plan.rounds.emplace_back();
  if (p == 1 || wing.sends_result()) plan.rounds.back().insert(plan.rounds.back().begin(), {Op::finalize, -1, all});
  return plan;
}

}  // namespace dltrain::comm
