#include "comm/program/crossover.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>

#include "tests/comm/ranks.h"

namespace dltrain::comm {
namespace {

// A network on which a round costs a latency, and a byte of the tensor an amount per plan. The clock counts nothing else.
struct Network {
  int world_size;
  double latency, per_byte;
  std::map<std::string, std::pair<int, double>> plans;  // rounds, and bytes sent per byte of the tensor
  double clock = 0;

  Crossover look(double time = 0.05) {
    const auto sum = [this](const std::string& algorithm, float* values, int64_t numel) {
      const auto& [rounds, times] = plans.at(algorithm);
      clock += rounds * latency + times * per_byte * static_cast<double>(numel * sizeof(float));
      for (int64_t i = 0; i < numel; ++i) values[i] *= static_cast<float>(world_size);  // all ranks have equal values
    };
    return look_for_crossover(world_size, Seconds(time), sum, [this] { return Seconds(clock); });
  }
};

Network of_four(double latency, double per_byte) {
  return {4, latency, per_byte, {{"recursive_doubling", {2, 2.0}}, {"tree", {4, 4.0}}, {"oneshot", {1, 3.0}}, {"direct", {2, 1.5}}}};
}

Network of_two(double latency, double per_byte) { return {2, latency, per_byte, {{"oneshot", {1, 2.0}}, {"direct", {2, 1.0}}}}; }

TEST(Crossover, SelectsFewRoundsForSmallSizes) {
  // The plans are equally fast for the size at which the bytes that direct saves cost a latency.
  for (const int64_t equal : {16 << 10, 64 << 10, 512 << 10}) {
    const Crossover found = of_two(1e-4, 1e-4 / static_cast<double>(equal)).look();
    EXPECT_EQ(found.plan_for(1, false), "oneshot") << equal;
    EXPECT_EQ(found.plan_for(equal / 8, false), "oneshot") << equal;
    EXPECT_EQ(found.plan_for(equal * 8, false), "direct") << equal;
  }
}

TEST(Crossover, SelectsFewBytesBeyondTheMeasuredSizes) {
  Network fast = of_two(1e-3, 1e-12);
  const Crossover found = fast.look();
  EXPECT_EQ(found.plan_for(found.by_size.rbegin()->first, false), "oneshot");
  EXPECT_EQ(found.plan_for(int64_t{64} << 20, false), "direct");
}

TEST(Crossover, DoesNotDependOnNoise) {
  Network network = of_four(1e-4, 0);
  network.plans["recursive_doubling"] = network.plans["oneshot"] = {2, 0};  // the same number of rounds as direct
  for (const auto& [bytes, plan] : network.look().by_size) EXPECT_EQ(plan, "direct") << bytes;
}

TEST(Crossover, SelectsPlansThatAcceptLossyCodecs) {
  Network network = of_four(1e-3, 1e-10);
  network.plans["direct"].first = network.plans["oneshot"].first = 9;
  const Crossover found = network.look();
  EXPECT_EQ(found.plan_for(4096, false), "recursive_doubling");
  EXPECT_EQ(found.plan_for(4096, true), "tree");
}

TEST(Crossover, SelectsOneShotForFewRanks) {
  Network network = of_four(1e-3, 1e-10);
  network.plans["direct"].first = 9;
  for (const bool lossy : {false, true}) EXPECT_EQ(network.look().plan_for(4096, lossy), "oneshot");
  network.world_size = 64;
  EXPECT_EQ(network.look().plan_for(4096, false), "recursive_doubling");
}

TEST(Crossover, MeasuresForALimitedTime) {
  Network usual = of_four(1e-4, 1e-9);
  usual.look();
  EXPECT_LT(usual.clock, 0.075);
  Network slow = of_four(0.15, 8e-7);  // 10 Mbit/s, 150 ms
  const Crossover found = slow.look();
  EXPECT_EQ(found.by_size.size(), 1u);
  EXPECT_LT(slow.clock, 4.0);  // one turn of four plans, each after a handshake, and the exchange of the times
}

TEST(Crossover, IsMeasuredOnceByAnExecutorAndNotCounted) {
  for (const int world_size : {1, 2, 3}) {
    on_ranks(world_size, [&](Executor& executor, Runner&) {
      CallOptions measured;
      measured.measures = true;
      int64_t sent = 0;
      for (int call = 0; call < 2; ++call) {
        std::vector<float> values(1000, 1.0f);
        executor.run({}, {values.data()}, static_cast<int64_t>(values.size()), measured);
        for (const float value : values) ASSERT_EQ(value, static_cast<float>(world_size));
        if (call == 0) sent = executor.wire_bytes();
      }
      EXPECT_LE(sent, int64_t{4000} * (world_size - 1) * 2);
      EXPECT_EQ(executor.wire_bytes(), 2 * sent);
    });
  }
}

}  // namespace
}  // namespace dltrain::comm
