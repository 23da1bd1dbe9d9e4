// The ring (Patarasuk & Yuan 2009; Baidu 2017). Rank r sends to r + 1 only. First the partial sums travel round, each growing by one part a
// step; then the finished chunks do. For four ranks, what each sends in each round (chunk; * means final):
//
//   round      0    1    2  |  3    4    5
//   rank 0     0    3    2  |  1*   0*   3*       rank r ends its half as the owner of chunk r + 1
//   rank 1     1    0    3  |  2*   1*   0*
//   rank 2     2    1    0  |  3*   2*   1*
//   rank 3     3    2    1  |  0*   3*   2*
//
// 2(p-1) rounds, 2n(p-1)/p bytes sent a rank: 2(p-1) alpha + 2n(p-1)/p beta + n(p-1)/p gamma.

#include "comm/plan/plan.h"

namespace dltrain::comm {

Plan ring(int rank, int p) {
  const auto modulo = [p](int i) { return (i % p + p) % p; };
  const auto chunk = [&](int i) { return Chunks{modulo(i), modulo(i) + 1}; };
  const int next = modulo(rank + 1), previous = modulo(rank - 1);

  Plan plan{"ring", rank, p, p, {}};
  for (int i = 0; i < p - 1; ++i) {
    plan.rounds.push_back({{Op::send_partial, next, chunk(rank - i)}, {Op::recv_reduce, previous, chunk(rank - i - 1)}});
  }
  plan.rounds.push_back({{Op::finalize, -1, chunk(rank + 1)}});
  for (int i = 0; i < p - 1; ++i) {
    if (i > 0) plan.rounds.emplace_back();
    plan.rounds.back().push_back({Op::send_final, next, chunk(rank + 1 - i)});
    plan.rounds.back().push_back({Op::recv_final, previous, chunk(rank - i)});
  }
  return plan;
}

}  // namespace dltrain::comm
