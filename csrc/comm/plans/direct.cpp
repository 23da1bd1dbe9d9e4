// Direct: scatter-reduce, then all-gather, each in one round of p - 1 messages (the "personalized" exchange). Every rank owns one chunk: it
// gets all parts of it at once, adds them in rank order, and sends the result to all. For four ranks, what rank r sends to rank q:
//
//   round 0: chunk q, r's part of it          round 1: chunk r, complete
//
// 2 rounds, 2n(p-1)/p bytes sent a rank: about 2 alpha + 2n(p-1)/p beta + n(p-1)/p gamma, incast apart. With a codec each element is
// requantised only once, so its error is the least of all plans that move so few bytes.

#include "comm/plan.h"

namespace dltrain::comm {

Plan direct(int rank, int p) {
  const auto chunk = [](int i) { return Chunks{i, i + 1}; };

  Round scatter, gather = {{Op::finalize, -1, chunk(rank)}};
  for (int distance = 1; distance < p; ++distance) {
    // Each rank starts with its own successor, so that no rank is everybody's first target.
    const int to = (rank + distance) % p, from = (rank + p - distance) % p;
    scatter.push_back({Op::send_partial, to, chunk(to)});
    scatter.push_back({Op::recv_reduce, from, chunk(rank)});
    gather.push_back({Op::send_final, to, chunk(rank)});
    gather.push_back({Op::recv_final, from, chunk(from)});
  }
  Plan plan{"direct", rank, p, p, {}};
  if (p > 1) plan.rounds.push_back(scatter);
  plan.rounds.push_back(gather);
  return plan;
}

}  // namespace dltrain::comm
