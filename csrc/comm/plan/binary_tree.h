#pragma once

// The in-order binary tree. Below node 0, a node whose lowest set bit is higher is nearer to the root. `tree` and both trees of
// `double_tree` have this shape. For eight nodes:
//
//   0 ─── 4 ─┬─ 2 ─┬─ 1
//            │     └─ 3
//            └─ 6 ─┬─ 5
//                  └─ 7
//
// The number of nodes is arbitrary: a node whose parent would be out of range is a child of its own number without the lowest set bit.

#include <algorithm>
#include <bit>
#include <vector>

#include "comm/plan/plan.h"

namespace dltrain::comm {

inline int parent_of(int node, int count) {
  const int low = node & -node, rest = node ^ low, parent = rest | (low << 1);
  return parent < count ? parent : rest;
}

inline std::vector<int> children_of(int node, int count) {
  std::vector<int> children;
  for (int reach = (node ? node & -node : static_cast<int>(std::bit_ceil(static_cast<unsigned>(count)))) >> 1; reach > 0; reach >>= 1) {
    for (int child : {node - reach, node + reach}) {
      if (0 < child && child < count && parent_of(child, count) == node) children.push_back(child);
    }
  }
  return children;
}

inline int depth_of(int node, int count) {
  int depth = 0;
  for (; node != 0; node = parent_of(node, count)) ++depth;
  return depth;
}

// Adds the steps by which the plan's rank reduces chunks up the tree and sends them down. rank_of(node) is the rank of a node. The
// children of a node send in the same round, so that their messages arrive together.
template <class RankOf>
class Tree {
 public:
  // passes: 1 for only up or only down, 2 for both.
  Tree(Plan& plan, Chunks chunks, int passes, RankOf rank_of) : plan_(plan), chunks_(chunks), rank_of_(rank_of), count_(plan.world_size) {
    while (rank_of(node_) != plan.rank) ++node_;
    own_depth_ = depth_of(node_, count_);
    plan.rounds.resize(std::max(passes * depth(), 1));
  }

  // The number of rounds of one pass.
  int depth() const { return count_ > 1 ? depth_of(1, count_) : 0; }

  // A node of depth d sends in round depth() - d.
  void reduce() {
    for (const int child : children_of(node_, count_)) add(depth() - own_depth_ - 1, Op::recv_reduce, rank_of_(child));
    if (node_ != 0) add(depth() - own_depth_, Op::send_partial, parent());
  }

  // Starts in round `first`: a node of depth d sends in round first + d.
  void finalize(int first) {
    if (node_ == 0) add(first, Op::finalize, -1);
  }
  void broadcast(int first) {
    if (node_ != 0) add(first + own_depth_ - 1, Op::recv_final, parent());
    for (const int child : children_of(node_, count_)) add(first + own_depth_, Op::send_final, rank_of_(child));
  }

 private:
  int parent() const { return rank_of_(parent_of(node_, count_)); }
  void add(int round, Op op, int peer) { plan_.rounds[round].push_back({op, peer, chunks_}); }

  Plan& plan_;
  const Chunks chunks_;
  const RankOf rank_of_;
  const int count_;
  int node_ = 0, own_depth_ = 0;
};

// Adds the steps of an all-reduce of these chunks.
template <class RankOf>
void add_tree(Plan& plan, Chunks chunks, RankOf rank_of) {
  Tree steps(plan, chunks, 2, rank_of);
  steps.reduce();
  steps.finalize(steps.depth());
  steps.broadcast(steps.depth());
}

}  // namespace dltrain::comm
