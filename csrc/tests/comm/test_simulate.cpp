#include "comm/program/simulate.h"

#include <gtest/gtest.h>

#include <cmath>

#include "comm/plan/plan.h"

namespace dltrain::comm {
namespace {

const Codec& raw() { return find_codec("raw"); }

Network network() {
  Network network;
  network.latency = 1e-4;
  network.bandwidth = network.inside_bandwidth = 1e9;
  return network;
}

double seconds(const char* algorithm, int world_size, int64_t numel, const Network& network, const Speed& speed = {}, int segments = 1) {
  return simulate(Collective::all_reduce, algorithm, world_size, numel, raw(), segments, network, speed).seconds;
}

TEST(Simulate, EqualsTheFormulaIfNothingIsShared) {
  const double n = 4 << 22, alpha = 1e-4, beta = 1e-9, gamma = 2e-10;  // gamma: per element
  for (const int p : {2, 4, 8, 64}) {
    const double log = std::log2(p), rest = (p - 1.0) / p;
    const Speed speed{0, gamma};
    EXPECT_NEAR(seconds("ring", p, 1 << 22, network(), speed), 2 * (p - 1) * alpha + 2 * n * rest * beta + n / 4 * rest * gamma, 1e-6);
    EXPECT_NEAR(seconds("recursive_doubling", p, 1 << 22, network(), speed), log * (alpha + n * beta + n / 4 * gamma), 1e-6);
    EXPECT_NEAR(seconds("halving_doubling", p, 1 << 22, network(), speed), 2 * log * alpha + 2 * n * rest * beta + n / 4 * rest * gamma,
                1e-6);
    EXPECT_NEAR(seconds("oneshot", p, 1 << 22, network(), speed), alpha + (p - 1) * n * beta + (p - 1) * n / 4 * gamma, 1e-6);
    EXPECT_NEAR(seconds("direct", p, 1 << 22, network(), speed), 2 * alpha + 2 * n * rest * beta + n / 4 * rest * gamma, 1e-6);
  }
  EXPECT_EQ(seconds("ring", 1, 1000, network()), 0);
  EXPECT_EQ(seconds("ring", 4, 0, network()), 0);
}

TEST(Simulate, SimulatesOneRankForAllThatDoTheSame) {
  for (const std::string& algorithm : algorithms()) {
    for (const int p : {132, 256}) {
      for (const int per_host : {1, 2, 4}) {
        for (const int segments : {1, 3}) {
          Network shared = network();
          shared.ranks_per_host = per_host;
          shared.inside_bandwidth = 5e9;
          shared.overhead = 1e-6;
          const int64_t numel = 132 * 256 * 64 * 3;
          const std::vector<double> together(p);  // with start times given, all ranks are simulated
          const Estimate one = simulate(Collective::all_reduce, algorithm, p, numel, raw(), segments, shared, {0, 1e-10});
          const Estimate all = simulate(Collective::all_reduce, algorithm, p, numel, raw(), segments, shared, {0, 1e-10}, together);
          // If ranks share a link, messages that reach it at the same time may be sent in another order.
          const double tolerance = per_host == 1 ? 1e-9 : 0.05;
          EXPECT_NEAR(one.seconds, all.seconds, tolerance * all.seconds) << algorithm << " " << p << " " << per_host << " " << segments;
          EXPECT_NEAR(static_cast<double>(one.wire_bytes), static_cast<double>(all.wire_bytes), 0.01 * static_cast<double>(all.wire_bytes));
        }
      }
    }
  }
}

TEST(Simulate, SharesLinksAndCores) {
  Network shared = network();
  shared.latency = shared.inside_latency = 0;
  shared.inside_bandwidth = 1e15;
  // Two ranks on each of two hosts: in a ring one message at a time crosses each link, and in direct two of each rank.
  shared.ranks_per_host = 2;
  const double n = 4e6;
  EXPECT_NEAR(seconds("ring", 4, 1'000'000, shared), 6 * n / 4 * 1e-9, 1e-6);
  EXPECT_NEAR(seconds("direct", 4, 1'000'000, shared), 2 * 4 * n / 4 * 1e-9, 1e-6);
  // Eight ranks add up n / 2 elements each on two cores.
  Network narrow = network();
  narrow.latency = 0;
  narrow.bandwidth = 1e15;
  narrow.cores = 2;
  EXPECT_NEAR(seconds("halving_doubling", 2, 1'000'000, narrow, {0, 1e-9}), 0.5e-3, 1e-6);
  EXPECT_NEAR(seconds("oneshot", 8, 1'000'000, narrow, {0, 1e-9}), 4 * 7e-3, 1e-6);
}

TEST(Simulate, AllowsABurst) {
  Network bucket = network();
  bucket.latency = 0;
  bucket.burst = 1e6;
  EXPECT_NEAR(seconds("oneshot", 2, 200'000, bucket), 0, 1e-9);                         // 0.8 MB
  EXPECT_NEAR(seconds("oneshot", 2, 1'000'000, bucket), 4e-3 - 1e-3, 1e-9);             // 4 MB
  EXPECT_NEAR(seconds("recursive_doubling", 4, 1'000'000, bucket), 8e-3 - 1e-3, 1e-9);  // without a pause the burst is used only once
}

TEST(Simulate, WaitsForLateRanks) {
  std::vector<double> late(8);
  late[5] = 0.5;
  for (const std::string& algorithm : algorithms()) {
    const double alone = simulate(Collective::all_reduce, algorithm, 8, 1000, raw(), 1, network(), {}).seconds;
    const double with = simulate(Collective::all_reduce, algorithm, 8, 1000, raw(), 1, network(), {}, late).seconds;
    EXPECT_GT(with, 0.5) << algorithm;
    EXPECT_LE(with, 0.5 + alone + 1e-9) << algorithm;
  }
}

TEST(Simulate, HidesEncodingBehindSending) {
  const Codec& int8 = find_codec("int8");
  const Speed speed{1e-9, 1e-9};
  const auto with = [&](int segments) {
    return simulate(Collective::all_reduce, "ring", 4, 4'000'000, int8, segments, network(), speed).seconds;
  };
  EXPECT_LT(with(4), 0.85 * with(1));
}

TEST(Simulate, SimulatesThousandsOfRanks) {
  for (const std::string& algorithm : algorithms()) {
    const Estimate estimate = simulate(Collective::all_reduce, algorithm, 4096, 25'000'000, raw(), 0, network(), {0, 1e-10});
    EXPECT_GT(estimate.seconds, 0.1) << algorithm;
  }
}

// The formula of one piece: the workers encode, the server's link carries all messages, the server adds them up and encodes, and so on.
TEST(SimulateServers, EqualsTheFormulaOfTheServersLink) {
  const double n = 4 << 20, alpha = 1e-4, beta = 1e-9;
  for (const int workers : {1, 2, 7}) {
    const Speed speed{2e-10, 3e-10};
    const Estimate one = simulate_servers(workers, 1, 1 << 20, find_codec("fp16"), 1, network(), speed);
    EXPECT_NEAR(one.seconds, 2 * alpha + 2 * workers * n / 2 * beta + n / 4 * (2 * speed.encode + (workers + 1) * speed.decode), 1e-9);
    EXPECT_EQ(one.wire_bytes, workers << 21);
    EXPECT_EQ(one.rounds, 2);
    // The last worker's message has passed the link when the first answer begins; all pieces but one overlap.
    const Estimate many = simulate_servers(workers, 1, 1 << 20, raw(), 16, network(), {});
    EXPECT_NEAR(many.seconds, 2 * alpha + workers * n * beta * 17 / 16, 1e-9);
    EXPECT_EQ(many.segments, 16);
  }
  EXPECT_EQ(simulate_servers(3, 2, 0, raw(), 0, network(), {}).seconds, 0);
  EXPECT_GT(simulate_servers(3, 200, 5, raw(), 0, network(), {}).seconds, 2 * alpha);  // most servers have nothing to do
}

TEST(SimulateServers, SharesTheLinksOfTheHosts) {
  Network shared = network();
  shared.latency = 0;
  shared.ranks_per_host = 4;
  const double n = 4 << 20;
  const auto with = [&](int servers) { return simulate_servers(8, servers, 1 << 20, raw(), 1, shared, {}).seconds; };
  EXPECT_NEAR(with(1), 2 * 8 * n * 1e-9, 1e-9);
  EXPECT_NEAR(with(2), 2 * 4 * n * 1e-9, 1e-9);
  EXPECT_GT(with(64), 1.8 * 4 * n * 1e-9);  // the links of the two hosts still carry as much; few of the answers overlap with pushes
}

TEST(Simulate, NamesTheWrongArgument) {
  EXPECT_THROW(simulate_servers(2, 0, 1, raw(), 1, network(), {}), std::invalid_argument);
  EXPECT_THROW(simulate_servers(0, 1, 1, raw(), 1, network(), {}), std::invalid_argument);
  EXPECT_THROW(simulate_servers(1 << 16, 1 << 16, 1, raw(), 1, network(), {}), std::invalid_argument);
  Network none;
  EXPECT_THROW(simulate(Collective::all_reduce, "ring", 2, 1, raw(), 1, none, {}), std::invalid_argument);
  EXPECT_THROW(simulate(Collective::all_reduce, "rign", 2, 1, raw(), 1, network(), {}), std::invalid_argument);
  EXPECT_THROW(simulate(Collective::all_reduce, "ring", 2, 1, raw(), 1, network(), {-1, 0}), std::invalid_argument);
  EXPECT_THROW(simulate(Collective::all_reduce, "ring", 2, 1, raw(), 1, network(), {}, {0.0}), std::invalid_argument);
}

}  // namespace
}  // namespace dltrain::comm
