// One shot: every rank sends all chunks to every other rank, and adds all parts in rank order. For four ranks, the only round is:
//
//   0 ◄─► 1   0 ◄─► 2   0 ◄─► 3   1 ◄─► 2   1 ◄─► 3   2 ◄─► 3
//
// 1 round, n(p-1) bytes sent per rank. Time: alpha + n(p-1) (beta + gamma). Nothing is requantised, so with a codec the error is the
// smallest of all plans. All ranks add the same messages, including their own, in the same order, so they have the same bits.

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
