// Direct: a reduce-scatter, then an all-gather, each in one round of p - 1 messages (the "personalized" exchange). Every rank owns a chunk,
// receives all parts of it in one round, adds them in rank order, and sends the result to all. For four ranks, rank r sends to rank q:
//
//   round 0: its part of chunk q              round 1: chunk r, complete
//
// 2 rounds, 2n(p-1)/p bytes sent per rank. Time: about 2 alpha + 2n(p-1)/p beta + n(p-1)/p gamma, without the cost of incast. With a codec
// each element is requantised only once, so the error is the smallest among the plans that send so few bytes.
//
// Each half is also a collective of its own: the first is a reduce-scatter, the second an all-gather. A broadcast and a reduce are made of
// similar rounds. For rank 0 as the root:
//
//   broadcast   round 0: 0 sends chunk q to rank q     round 1: rank r sends chunk r to all but the root
//   reduce      round 0: as in the all-reduce          round 1: rank r sends chunk r, complete, to the root
//
// In both a rank sends about n(p-1)/p bytes, and the root of a broadcast twice as many.

#include "comm/plan/plan.h"

namespace dltrain::comm {

namespace {

Chunks chunk(int i) { return {i, i + 1}; }

// Calls visit(to, from) for each distance. Each rank starts with its successor, so that no rank is the first target of all the others.
template <class Visit>
void around(int rank, int p, Visit visit) {
  for (int distance = 1; distance < p; ++distance) visit((rank + distance) % p, (rank + p - distance) % p);
}

void add_scatter(Plan& plan) {
  if (plan.world_size == 1) return;
  Round& round = plan.rounds.emplace_back();
  around(plan.rank, plan.world_size, [&](int to, int from) {
    round.push_back({Op::send_partial, to, chunk(to)});
    round.push_back({Op::recv_reduce, from, chunk(plan.rank)});
  });
}

void add_gather(Plan& plan) {
  const int rank = plan.rank;
  Round& round = plan.rounds.emplace_back();
  round.push_back({Op::finalize, -1, chunk(rank)});
  around(rank, plan.world_size, [&](int to, int from) {
    round.push_back({Op::send_final, to, chunk(rank)});
    round.push_back({Op::recv_final, from, chunk(from)});
  });
}

}  // namespace

Plan direct(int rank, int p) {
  Plan plan{Collective::all_reduce, "direct", rank, p, p};
  add_scatter(plan);
  add_gather(plan);
  return plan;
}

Plan direct_reduce_scatter(int rank, int p) {
  Plan plan{Collective::reduce_scatter, "direct", rank, p, p};
  add_scatter(plan);
  return plan;
}

Plan direct_all_gather(int rank, int p) {
  Plan plan{Collective::all_gather, "direct", rank, p, p};
  add_gather(plan);
  return plan;
}

Plan direct_broadcast(int rank, int p) {
  Plan plan{Collective::broadcast, "direct", rank, p, p};
  plan.rounds.resize(p > 1 ? 2 : 1);
  if (rank == 0) {
    plan.rounds[0].push_back({Op::finalize, -1, {0, p}});
    around(rank, p, [&](int to, int) { plan.rounds[0].push_back({Op::send_final, to, chunk(to)}); });
  } else {
    plan.rounds[0].push_back({Op::recv_final, 0, chunk(rank)});
  }
  around(rank, p, [&](int to, int from) {
    if (to != 0) plan.rounds[1].push_back({Op::send_final, to, chunk(rank)});
    if (rank != 0) plan.rounds[1].push_back({Op::recv_final, from, chunk(from)});
  });
  return plan;
}

Plan direct_reduce(int rank, int p) {
  Plan plan{Collective::reduce, "direct", rank, p, p};
  add_scatter(plan);
  if (p == 1) return plan;
  Round& round = plan.rounds.emplace_back();
  if (rank != 0) round = {{Op::finalize, -1, chunk(rank)}, {Op::send_final, 0, chunk(rank)}};
  around(rank, p, [&](int, int from) {
    if (rank == 0) round.push_back({Op::recv_final, from, chunk(from)});
  });
  return plan;
}

}  // namespace dltrain::comm
