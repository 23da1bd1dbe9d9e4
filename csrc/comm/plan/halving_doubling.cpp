// Halving-doubling, the butterfly for large messages (Rabenseifner 2004). At distance 1, 2, 4, ... partners divide the chunks that they
// still reduce, and each keeps one half. Then the exchanges are repeated in reverse order, and the final chunks of a rank double each
// time. For four ranks, what each rank sends (* means final):
//
//   round      0     1   |  2     3
//   rank 0    2-3    1   |  0*   0-1*        after round 1, rank r owns the chunk whose number is r with its bits reversed
//   rank 1    0-1    3   |  2*   2-3*
//   rank 2    2-3    0   |  1*   0-1*
//   rank 3    0-1    2   |  3*   2-3*
//
// 2 log2 p rounds, 2n(p-1)/p bytes sent per rank. Time: 2 log2 p alpha + 2n(p-1)/p beta + n(p-1)/p gamma; if p is not a power of two,
// there are 2 more rounds, with 2n beta + n gamma.

#include <utility>

#include "comm/plan/butterfly.h"

namespace dltrain::comm {

Plan halving_doubling(int rank, int p) {
  const Butterfly butterfly(rank, p);
  Plan plan{Collective::all_reduce, "halving_doubling", rank, p, butterfly.active};
  butterfly.fold_in(plan);
  Chunks mine{0, butterfly.active};
  std::vector<Round> back;  // in reverse order
  for (int distance = 1; distance < butterfly.active; distance *= 2) {
    plan.rounds.emplace_back();
    back.emplace_back();
    if (butterfly.is_inactive()) continue;
    const int partner = butterfly.partner(distance), middle = (mine.begin + mine.end) / 2;
    Chunks kept{mine.begin, middle}, given{middle, mine.end};
    if (butterfly.index() & distance) std::swap(kept, given);
    plan.rounds.back() = {{Op::send_partial, partner, given}, {Op::recv_reduce, partner, kept}};
    back.back() = {{Op::send_final, partner, kept}, {Op::recv_final, partner, given}};
    mine = kept;
  }
  if (back.empty()) back.emplace_back();
  if (!butterfly.is_inactive()) back.back().insert(back.back().begin(), {Op::finalize, -1, mine});
  plan.rounds.insert(plan.rounds.end(), back.rbegin(), back.rend());
  butterfly.fold_out(plan);
  return plan;
}

}  // namespace dltrain::comm
