// One reduction tree (FireCaffe, Iandola et al. 2016), then the same tree downwards. For four ranks, one chunk (* means final):
//
//   round 0     1 ─► 2 ◄─ 3        the leaves send, 2 folds both
//   round 1          2 ─► 0        0 folds: complete
//   round 2          0 ─►* 2
//   round 3     1 *◄─ 2 ─►* 3
//
// About 2 log2 p rounds; a rank with two children sends 3n bytes: 2 log2 p (alpha + 2n beta) + 2 log2 p n gamma in one piece. In segments
// all levels work at the same time, and what is left is the 2n that the busiest rank sends downwards.

//
// The way up by itself is a reduce, the way down a broadcast, with rank 0 as the root; each has about log2 p rounds.

#include "comm/plan/binary_tree.h"

namespace dltrain::comm {

namespace {

int same(int node) { return node; }

}  // namespace

Plan tree(int rank, int p) {
  Plan plan{Collective::all_reduce, "tree", rank, p, 1};
  add_tree(plan, {0, 1}, same);
  return plan;
}

Plan tree_reduce(int rank, int p) {
  Plan plan{Collective::reduce, "tree", rank, p, 1};
  Tree(plan, {0, 1}, 1, same).reduce();
  return plan;
}

Plan tree_broadcast(int rank, int p) {
  Plan plan{Collective::broadcast, "tree", rank, p, 1};
  Tree way(plan, {0, 1}, 1, same);
  way.finalize(0);
  way.broadcast(0);
  return plan;
}

}  // namespace dltrain::comm
