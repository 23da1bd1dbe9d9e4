// The ring (Patarasuk & Yuan 2009; Baidu 2017). Rank r sends only to rank r + 1. First the partial sums pass around the ring, and each rank
// adds its part; then the final chunks pass around. For four ranks, the chunk that each rank sends in each round (* means final):
//
//   round      0    1    2  |  3    4    5
//   rank 0     0    3    2  |  1*   0*   3*       after round 2, rank r owns chunk r + 1
//   rank 1     1    0    3  |  2*   1*   0*
//   rank 2     2    1    0  |  3*   2*   1*
//   rank 3     3    2    1  |  0*   3*   2*
//
// 2(p-1) rounds, 2n(p-1)/p bytes sent per rank. Time: 2(p-1) alpha + 2n(p-1)/p beta + n(p-1)/p gamma.
//
// Each half is also a collective of its own, in p - 1 rounds: the first is a reduce-scatter, after which rank r owns chunk r, the second an
// all-gather.

#include "comm/plan/plan.h"

namespace dltrain::comm {

namespace {

class Ring {
 public:
  explicit Ring(Plan& plan) : plan_(plan), p_(plan.world_size), next_(modulo(plan.rank + 1)), previous_(modulo(plan.rank - 1)) {}

  // At its end this rank has the sum of the chunk `owned`.
  void reduce_scatter(int owned) {
    for (int i = 0; i < p_ - 1; ++i) {
      plan_.rounds.push_back({{Op::send_partial, next_, chunk(owned - 1 - i)}, {Op::recv_reduce, previous_, chunk(owned - 2 - i)}});
    }
  }

  void all_gather(int owned) {
    plan_.rounds.push_back({{Op::finalize, -1, chunk(owned)}});
    for (int i = 0; i < p_ - 1; ++i) {
      if (i > 0) plan_.rounds.emplace_back();
      plan_.rounds.back().push_back({Op::send_final, next_, chunk(owned - i)});
      plan_.rounds.back().push_back({Op::recv_final, previous_, chunk(owned - 1 - i)});
    }
  }

 private:
  int modulo(int i) const { return (i % p_ + p_) % p_; }
  Chunks chunk(int i) const { return {modulo(i), modulo(i) + 1}; }

  Plan& plan_;
  const int p_, next_, previous_;
};

}  // namespace

Plan ring(int rank, int p) {
  Plan plan{Collective::all_reduce, "ring", rank, p, p};
  Ring(plan).reduce_scatter(rank + 1);
  Ring(plan).all_gather(rank + 1);
  return plan;
}

Plan ring_reduce_scatter(int rank, int p) {
  Plan plan{Collective::reduce_scatter, "ring", rank, p, p};
  Ring(plan).reduce_scatter(rank);
  return plan;
}

Plan ring_all_gather(int rank, int p) {
  Plan plan{Collective::all_gather, "ring", rank, p, p};
  Ring(plan).all_gather(rank);
  return plan;
}

}  // namespace dltrain::comm
