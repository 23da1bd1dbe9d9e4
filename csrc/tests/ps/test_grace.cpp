// Tests the grace of a quorum on nodes: its clock, the weighted mean, and its replay. No test depends on how long anything takes: a grace
// is either so long that it does not end, or it ends while nothing else happens.

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <latch>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/ps/stores.h"

namespace dltrain::ps {
namespace {

using std::chrono::milliseconds;

constexpr Clock::duration endless = std::chrono::hours(1), brief = milliseconds(5);
constexpr std::optional<int64_t> any_staleness;

Configuration setup_of(std::vector<int> workers, std::vector<int> servers, int quorum, Clock::duration grace) {
  Configuration setup{.workers = std::move(workers), .servers = std::move(servers), .values = {}};
  for (const size_t size : {5, 70, 1}) setup.values.emplace_back(size, 2.0f);
  setup.options.quorum = quorum;
  setup.options.grace = grace;
  return setup;
}

Blocks filled(const Configuration& setup, float value) {
  Blocks all;
  for (const Floats& block : setup.values) all.emplace_back(block.size(), value);
  return all;
}

std::vector<int64_t> kinds(const std::vector<Handled>& record, Handled::What what) {
  std::vector<int64_t> clocks;
  for (const Handled& each : record) {
    if (each.what == what) clocks.push_back(each.clock);
  }
  return clocks;
}

TEST(PsGrace, AVersionIsTheWeightedMeanOfAllThatHavePushed) {
  for (const std::vector<int>& servers : {std::vector{0, 2}, std::vector{3}}) {
    const Configuration setup = setup_of({0, 1, 2}, servers, 2, endless);
    Store store(setup);
    const float weights[] = {0.5f, 1.0f, 2.5f};  // 4 in all
    std::vector<Store::Pulled> pulled;
    for (const int rank : {2, 0, 1}) {
      store.wait(store.push_weighted(rank, 0, filled(setup, static_cast<float>(8 * (rank + 1))), weights[rank]));
      store.wait(store.begin_pull(rank, 1, any_staleness).ticket);  // which has the first values until the last one has pushed
      if (rank != 1) pulled.push_back(store.begin_applied_pull(rank, 1));
    }
    for (const Store::Pulled& each : pulled) {
      store.wait(each.ticket);
      EXPECT_EQ(each.ticket->versions().highest, 1);
      EXPECT_EQ(*each.values, filled(setup, 2.0f + (0.5f * 8 + 1.0f * 16 + 2.5f * 24) / 4.0f));
    }
  }
}

TEST(PsGrace, ALoneContributionIsDividedByItsWeight) {
  for (const bool skips : {false, true}) {
    Configuration setup = setup_of({0}, {0}, 1, endless);
    setup.has_threads = false;
    Store store(setup);
    store.push(0, 0, filled(setup, 6.0f), 8.0f, 1.0, skips, 8.0f);
    EXPECT_EQ(store.pull(0, 1), filled(setup, skips ? 2.0f : 8.0f));
  }
}

TEST(PsGrace, ItIsOverWithoutAMessage) {
  for (const std::vector<int>& servers : {std::vector{0}, std::vector{3}, std::vector{0, 3}}) {  // a push may be handled by its own thread
    for (const int quorum : {1, 2}) {
      const Configuration setup = setup_of({0, 1, 2}, servers, quorum, brief);
      Store store(setup);
      for (int64_t clock = 0; clock < 3; ++clock) {
        for (int rank = 0; rank < quorum; ++rank) store.push_weighted(rank, clock, filled(setup, 3.0f), 2.0f);
        for (int rank = 0; rank < quorum; ++rank) {
          const Store::Pulled pulled = store.begin_applied_pull(rank, clock + 1);
          store.wait(pulled.ticket);
        }
      }
      EXPECT_EQ(store.pull(2, 0, any_staleness), filled(setup, 11.0f));
    }
  }
}

TEST(PsGrace, APullThatWaitsForItSaysForWhom) {
  const Configuration setup = setup_of({1, 2, 3}, {0}, 2, endless);
  Store store(setup);
  for (const int rank : {1, 3}) store.wait(store.push(rank, 0, filled(setup, 1.0f)));
  const Store::Pulled pulled = store.begin_applied_pull(3, 1);
  EXPECT_EQ(store.node(3).reasons(pulled.ticket, milliseconds(100'000)), "the server of rank 0 waits for pushes of rank 2");
  EXPECT_FALSE(pulled.ticket->is_done());
  store.node(2).close(milliseconds(0));  // then all that are left have pushed
  store.wait(pulled.ticket);
  EXPECT_EQ(*pulled.values, filled(setup, 3.0f));
}

TEST(PsGrace, PollEndsIt) {
  Configuration setup = setup_of({0, 1}, {0}, 1, milliseconds(1));
  setup.has_threads = false;
  Store store(setup);
  store.push(1, 0, filled(setup, 1.0f));
  const Store::Pulled pulled = store.begin_applied_pull(1, 1);
  while (!pulled.ticket->is_done()) store.poll();
  EXPECT_EQ(*pulled.values, filled(setup, 3.0f));
}

TEST(PsGrace, IsNotForAllOrWithDelayCompensation) {
  Configuration setup = setup_of({0, 1}, {0}, Core::all, brief);
  EXPECT_EQ(thrown([&] { Store store(setup); }), "grace: expected none with quorum all");
  setup.options.quorum = 1;
  setup.options.delay_compensation = 0.1f;
  EXPECT_EQ(thrown([&] { Store store(setup); }), "grace: expected none with delay compensation");
}

float weight_of(int rank, int64_t clock) { return 1.0f + static_cast<float>(rank) + 0.3f * static_cast<float>(clock); }

Blocks gradient_of(const Configuration& setup, int rank, int64_t clock) {
  return filled(setup, 0.1f * static_cast<float>(rank + 1) + 0.7f * static_cast<float>(clock));
}

TEST(PsGrace, AReplayEndsItWhereTheRecordDoes) {
  constexpr int64_t clocks = 12;
  Configuration setup = setup_of({0, 1, 2}, {0, 1}, 2, std::chrono::microseconds(200));
  setup.push_codec = setup.pull_codec = "int8";
  setup.options.records = true;
  std::vector<std::vector<Handled>> records;
  Blocks expected;
  {
    Store store(setup);
    std::latch have_waited(2);
    std::vector<std::thread> threads;
    for (const int rank : setup.workers) {
      threads.emplace_back([&, rank] {
        if (rank == 2) have_waited.wait();
        for (int64_t clock = 0; clock < clocks; ++clock) {
          store.push_weighted(rank, clock, gradient_of(setup, rank, clock), weight_of(rank, clock));
          if (rank < 2 && clock == 0) store.wait(store.begin_applied_pull(rank, 1).ticket);  // without rank 2
          if (rank < 2 && clock == 0) have_waited.count_down();
          store.pull(rank, clock + 1, any_staleness);
        }
        EXPECT_TRUE(store.node(rank).finish(late()));
      });
    }
    for (std::thread& thread : threads) thread.join();
    expected = store.values();
    for (const int rank : setup.servers) records.push_back(store.record(rank));
  }
  for (const std::vector<Handled>& record : records) {
    EXPECT_EQ(kinds(record, Handled::What::applied_pull), (std::vector<int64_t>{1, 1}));
    ASSERT_FALSE(kinds(record, Handled::What::grace).empty());
    EXPECT_EQ(kinds(record, Handled::What::grace).front(), 1);
  }

  setup.has_threads = false;
  setup.options.grace = endless;
  for (const int rank : setup.servers) setup.replayed[rank] = records[static_cast<size_t>(rank)];
  Store replay(setup);
  for (const int rank : {2, 1, 0}) {
    for (int64_t clock = 0; clock < clocks; ++clock) {
      replay.push_weighted(rank, clock, gradient_of(setup, rank, clock), weight_of(rank, clock));
      if (rank < 2 && clock == 0) replay.begin_applied_pull(rank, 1);
      replay.begin_pull(rank, clock + 1, any_staleness);
    }
    replay.node(rank).finish(Clock::now());
  }
  replay.poll();
  for (const int rank : setup.servers) EXPECT_EQ(replay.record(rank), records[static_cast<size_t>(rank)]);
  EXPECT_EQ(replay.values(), expected);
}

TEST(PsGrace, AReplayHasNoClock) {
  Configuration setup = setup_of({0, 1, 2}, {0}, 1, Clock::duration(1));
  setup.values.resize(1);
  setup.has_threads = false;
  setup.options.records = true;
  using enum Handled::What;
  setup.replayed[0] = {{push, 0, 0, 0}, {push, 1, 0, 0}, {grace, -1, 1, 0}, {push, 1, 1, 0}, {grace, -1, 7, 0}, {push, 2, 0, 0}};
  Store store(setup);
  for (const int rank : {2, 0}) store.push_weighted(rank, 0, filled(setup, 8.0f), 1.0f);
  store.push_weighted(1, 0, filled(setup, 4.0f), 3.0f);
  store.poll();
  EXPECT_EQ(store.values(), filled(setup, 2.0f + (8.0f + 3.0f * 4.0f) / 4.0f));
  store.push_weighted(1, 1, filled(setup, 16.0f), 1.0f);
  store.poll();
  EXPECT_EQ(store.values(), filled(setup, 7.0f));  // although its grace is long over
  store.push_weighted(0, 1, filled(setup, 0.0f), 2.0f);
  store.poll();
  EXPECT_EQ(store.values(), filled(setup, 7.0f + (16.0f + 8.0f) / 4.0f));
  EXPECT_EQ(kinds(store.record(0), grace), std::vector<int64_t>{1});  // what ends nothing is not kept
}

}  // namespace
}  // namespace dltrain::ps
