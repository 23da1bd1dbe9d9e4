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

// Reduces the chunks up the tree and sends them down again. rank_of(node) says who stands where. A node of depth d sends up in round
// depth - d and down in round depth + d, so that its children's messages arrive together.
template <class RankOf>
void add_tree(Plan& plan, Chunks chunks, RankOf rank_of) {
  const int count = plan.world_size, depth = count > 1 ? depth_of(1, count) : 0;
  int node = 0;
  while (rank_of(node) != plan.rank) ++node;
  const int own_depth = depth_of(node, count), up = depth - own_depth, down = depth + own_depth;

  plan.rounds.resize(std::max(2 * depth, 1));
  const auto add = [&](int round, Op op, int peer) { plan.rounds[round].push_back({op, peer, chunks}); };
  const std::vector<int> children = children_of(node, count);
  for (int child : children) add(up - 1, Op::recv_reduce, rank_of(child));
  if (node == 0) {
    add(up, Op::finalize, -1);
  } else {
    add(up, Op::send_partial, rank_of(parent_of(node, count)));
    add(down - 1, Op::recv_final, rank_of(parent_of(node, count)));
  }
  for (int child : children) add(down, Op::send_final, rank_of(child));
}

}  // namespace dltrain::comm
