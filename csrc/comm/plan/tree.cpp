// One reduction tree (FireCaffe, Iandola et al. 2016), then the same tree downwards. For four ranks, one chunk (* means final):
//
//   round 0     1 ─► 2 ◄─ 3        the leaves send, 2 folds both
//   round 1          2 ─► 0        0 folds: complete
//   round 2          0 ─►* 2
//   round 3     1 *◄─ 2 ─►* 3
//
// About 2 log2 p rounds; a rank with two children sends 3n bytes: 2 log2 p (alpha + 2n beta) + 2 log2 p n gamma in one piece. In segments
// all levels work at the same time, and what is left is the 2n that the busiest rank sends downwards.

#include "comm/plan/binary_tree.h"

namespace dltrain::comm {

Plan tree(int rank, int p) {
  Plan plan{"tree", rank, p, 1, {}};
  add_tree(plan, {0, 1}, [](int node) { return node; });
  return plan;
}

}  // namespace dltrain::comm
