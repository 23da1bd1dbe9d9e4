#pragma once

// The in-order binary tree: below node 0, what has its lowest bit higher lies nearer to the root. For eight nodes:
//
//   0 ─── 4 ─┬─ 2 ─┬─ 1
//            │     └─ 3
//            └─ 6 ─┬─ 5
//                  └─ 7
//
// Any number of nodes: one whose parent would lie outside hangs below what is left without its lowest bit.

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

// What the rank of a plan does to have chunks reduced up the tree, and sent down. rank_of(node) says who stands where. The children of a
// node send in one round, so that their messages arrive together.
template <class RankOf>
class Tree {
 public:
  // ways: 1 or, up and down, 2.
  Tree(Plan& plan, Chunks chunks, int ways, RankOf rank_of) : plan_(plan), chunks_(chunks), rank_of_(rank_of), count_(plan.world_size) {
    while (rank_of(node_) != plan.rank) ++node_;
    own_depth_ = depth_of(node_, count_);
    plan.rounds.resize(std::max(ways * depth(), 1));
  }

  // So many rounds does a way take.
  int depth() const { return count_ > 1 ? depth_of(1, count_) : 0; }

  // A node of depth d sends in round depth() - d.
  void reduce() {
    for (const int child : children_of(node_, count_)) add(depth() - own_depth_ - 1, Op::recv_reduce, rank_of_(child));
    if (node_ != 0) add(depth() - own_depth_, Op::send_partial, parent());
  }

  // From round `first` on: a node of depth d sends d rounds later.
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

// An all-reduce of these chunks.
template <class RankOf>
void add_tree(Plan& plan, Chunks chunks, RankOf rank_of) {
  Tree way(plan, chunks, 2, rank_of);
  way.reduce();
  way.finalize(way.depth());
  way.broadcast(way.depth());
}

}  // namespace dltrain::comm
