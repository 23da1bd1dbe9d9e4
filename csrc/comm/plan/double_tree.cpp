// Two trees, each for half of the data (Sanders, Speck & Traeff 2009). The second tree is the first one mirrored or, for an odd number of
// ranks, shifted by one, so that a leaf of one tree is an inner node of the other, and all ranks send about as much. For four ranks:
//
//   chunk 0, tree 0 ─ 2 ─ {1, 3}           chunk 1, tree 3 ─ 1 ─ {2, 0}
//
//   round 0     1 ─► 2 ◄─ 3                     2 ─► 1 ◄─ 0
//   round 1          2 ─► 0                          1 ─► 3
//   round 2          0 ─►* 2                         3 ─►* 1
//   round 3     1 *◄─ 2 ─►* 3                   2 *◄─ 1 ─►* 0
//
// About 2 log2 p rounds, at most 2n bytes sent per rank. Time in segments, for large n: 2 log2 p alpha + 2n beta + n gamma.

#include "comm/plan/binary_tree.h"

namespace dltrain::comm {

Plan double_tree(int rank, int p) {
  Plan plan{Collective::all_reduce, "double_tree", rank, p, 2};
  add_tree(plan, {0, 1}, [](int node) { return node; });
  add_tree(plan, {1, 2}, [p](int node) { return p % 2 == 0 ? p - 1 - node : (node + 1) % p; });
  return plan;
}

}  // namespace dltrain::comm
