// Recursive doubling, the butterfly for small messages: at distance 1, 2, 4, ... partners exchange all their chunks. For four ranks:
//
//   round 0     0 ◄─► 1    2 ◄─► 3
//   round 1     0 ◄─► 2    1 ◄─► 3         now every rank has the sum
//
// log2 p rounds, n log2 p bytes sent per rank. Time: log2 p (alpha + n beta + n gamma); if p is not a power of two, there are 2 more
// rounds, with 2n beta + n gamma (Thakur, Rabenseifner & Gropp 2005). Partners add the same two numbers, so all ranks hold the same bits.
// But each sum is computed and encoded on several ranks, and an element more than once, so the plan is only for lossless codecs.

#include "comm/plan/butterfly.h"

namespace dltrain::comm {

Plan recursive_doubling(int rank, int p) {
  const Butterfly butterfly(rank, p);
  const Chunks all{0, 1};
  Plan plan{Collective::all_reduce, "recursive_doubling", rank, p, 1, 0, {}, true};
  butterfly.fold_in(plan);
  for (int distance = 1; distance < butterfly.active; distance *= 2) {
    plan.rounds.emplace_back();
    if (butterfly.is_inactive()) continue;
    plan.rounds.back() = {{Op::send_partial, butterfly.partner(distance), all}, {Op::recv_reduce, butterfly.partner(distance), all}};
  }
  butterfly.fold_out(plan);
  if (p == 1) plan.rounds.emplace_back();
  if (p == 1 || butterfly.sends_result()) plan.rounds.back().insert(plan.rounds.back().begin(), {Op::finalize, -1, all});
  return plan;
}

}  // namespace dltrain::comm
