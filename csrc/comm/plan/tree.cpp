// A reduction tree (FireCaffe, Iandola et al. 2016), then a broadcast down the same tree. For four ranks, one chunk (* means final):
//
//   round 0     1 ─► 2 ◄─ 3        the leaves send, rank 2 folds both
//   round 1          2 ─► 0        rank 0 folds, and the chunk is complete
//   round 2          0 ─►* 2
//   round 3     1 *◄─ 2 ─►* 3
//
// About 2 log2 p rounds; a rank with two children sends 3n bytes. Time in one segment: 2 log2 p (alpha + 2n beta) + 2 log2 p n gamma. With
// many segments all depths of the tree work at the same time, and the 2n bytes that the busiest rank sends downwards determine the time.
//
// The first half alone is a reduce, the second half a broadcast, with rank 0 as the root. Each has about log2 p rounds.

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
  Tree steps(plan, {0, 1}, 1, same);
  steps.finalize(0);
  steps.broadcast(0);
  return plan;
}

}  // namespace dltrain::comm
