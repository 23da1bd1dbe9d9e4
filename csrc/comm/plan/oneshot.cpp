// One shot: everybody sends all it has to everybody, and adds all parts in rank order. For four ranks, the one round:
//
//   0 ◄─► 1   0 ◄─► 2   0 ◄─► 3   1 ◄─► 2   1 ◄─► 3   2 ◄─► 3
//
// 1 round, n(p-1) bytes sent a rank: alpha + n(p-1) (beta + gamma). Nothing is requantised, so with a codec its error is the least of all.
// All ranks add the same messages, their own among them, in the same order: the same bits.

#include "comm/plan/plan.h"

namespace dltrain::comm {

Plan oneshot(int rank, int p) {
  const Chunks all{0, 1};
  Plan plan{Collective::all_reduce, "oneshot", rank, p, 1, 0, {{}}};
  if (p == 1) plan.rounds[0].push_back({Op::finalize, -1, all});
  for (int distance = 1; distance < p; ++distance) {
    plan.rounds[0].push_back({Op::send_partial, (rank + distance) % p, all});
    plan.rounds[0].push_back({Op::recv_reduce, (rank + p - distance) % p, all});
  }
  return plan;
}

}  // namespace dltrain::comm
