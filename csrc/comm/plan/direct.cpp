// Direct: scatter-reduce, then all-gather, each in one round of p - 1 messages (the "personalized" exchange). Every rank owns one chunk: it
// gets all parts of it at once, adds them in rank order, and sends the result to all. For four ranks, what rank r sends to rank q:
//
//   round 0: chunk q, r's part of it          round 1: chunk r, complete
//
// 2 rounds, 2n(p-1)/p bytes sent a rank: about 2 alpha + 2n(p-1)/p beta + n(p-1)/p gamma, incast apart. With a codec each element is
// requantised only once, so its error is the least of all plans that move so few bytes.

#include "comm/plan/plan.h"

namespace dltrain::comm {

namespace {

Chunks chunk(int i) { return {i, i + 1}; }

// Calls visit(to, from) for each distance: each rank starts with its own successor, so that no rank is everybody's first target.
template <class Visit>
void around(int rank, int p, Visit visit) {
  for (int distance = 1; distance < p; ++distance) visit((rank + distance) % p, (rank + p - distance) % p);
}

}  // namespace

Plan reduce_scatter(int rank, int p) {
  Plan plan{"reduce_scatter", rank, p, p, {}};
  Round scatter;
  around(rank, p, [&](int to, int from) {
    scatter.push_back({Op::send_partial, to, chunk(to)});
    scatter.push_back({Op::recv_reduce, from, chunk(rank)});
  });
  if (p > 1) plan.rounds.push_back(scatter);
  return plan;
}

Plan all_gather(int rank, int p) {
  Plan plan{"all_gather", rank, p, p, {{{Op::finalize, -1, chunk(rank)}}}};
  around(rank, p, [&](int to, int from) {
    plan.rounds[0].push_back({Op::send_final, to, chunk(rank)});
    plan.rounds[0].push_back({Op::recv_final, from, chunk(from)});
  });
  return plan;
}

Plan direct(int rank, int p) {
  Plan plan = reduce_scatter(rank, p);
  plan.algorithm = "direct";
  plan.rounds.push_back(all_gather(rank, p).rounds[0]);
  return plan;
}

}  // namespace dltrain::comm
