// Halving-doubling, the butterfly for large messages (Rabenseifner 2004): at distance 1, 2, 4, ... partners share what they still care for,
// each keeping one half; then the way back, in which what they own doubles. For four ranks, what each sends (* means final):
//
//   round      0     1   |  2     3
//   rank 0    2-3    1   |  0*   0-1*        rank r ends its half as the owner of the chunk that is r with its bits reversed
//   rank 1    0-1    3   |  2*   2-3*
//   rank 2    2-3    0   |  1*   0-1*
//   rank 3    0-1    2   |  3*   2-3*
//
// 2 log2 p rounds, 2n(p-1)/p bytes sent a rank: 2 log2 p alpha + 2n(p-1)/p beta + n(p-1)/p gamma. Beyond a power of two: 2 rounds more,
// 2n beta + n gamma.

#include <utility>

#include "comm/plan/butterfly.h"

namespace dltrain::comm {

Plan halving_doubling(int rank, int p) {
  const Butterfly wing(rank, p);
  Plan plan{Collective::all_reduce, "halving_doubling", rank, p, wing.active};
  wing.fold_in(plan);
  Chunks mine{0, wing.active};
  std::vector<Round> back;  // the last comes first
  for (int distance = 1; distance < wing.active; distance *= 2) {
    plan.rounds.emplace_back();
    back.emplace_back();
    if (wing.stands_aside()) continue;
    const int partner = wing.partner(distance), middle = (mine.begin + mine.end) / 2;
    Chunks kept{mine.begin, middle}, given{middle, mine.end};
    if (wing.number() & distance) std::swap(kept, given);
    plan.rounds.back() = {{Op::send_partial, partner, given}, {Op::recv_reduce, partner, kept}};
    back.back() = {{Op::send_final, partner, kept}, {Op::recv_final, partner, given}};
    mine = kept;
  }
  if (back.empty()) back.emplace_back();
  if (!wing.stands_aside()) back.back().insert(back.back().begin(), {Op::finalize, -1, mine});
  plan.rounds.insert(plan.rounds.end(), back.rbegin(), back.rend());
  wing.fold_out(plan);
  return plan;
}

}  // namespace dltrain::comm
