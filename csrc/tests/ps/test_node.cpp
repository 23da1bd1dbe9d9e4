#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/ps/stores.h"

namespace dltrain::ps {
namespace {

using std::chrono::milliseconds;

constexpr std::optional<int64_t> any_staleness;

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks;
  for (int rank = 0; rank < count; ++rank) ranks.push_back(rank);
  return ranks;
}

Configuration setup_of(std::vector<int> workers, std::vector<int> servers, const std::vector<size_t>& sizes = {5, 70, 1}) {
  Configuration setup{.workers = std::move(workers), .servers = std::move(servers), .values = {}};
  for (const size_t size : sizes) setup.values.emplace_back(size, 2.0f);
  return setup;
}

Configuration asynchronous(Configuration setup) {
  setup.options.quorum = 1;
  return setup;
}

Configuration without_threads(Configuration setup) {
  setup.has_threads = false;
  return setup;
}

// Small integers, whose sums are exact.
Blocks gradients(const Configuration& setup, int rank, int64_t clock) {
  Blocks all;
  for (const Floats& value : setup.values) {
    Floats& gradient = all.emplace_back();
    for (size_t i = 0; i < value.size(); ++i) {
      gradient.push_back(static_cast<float>((rank * 5 + clock * 3 + static_cast<int64_t>(i + all.size())) % 11) - 4.0f);
    }
  }
  return all;
}

void add(Blocks& sum, const Blocks& added, float factor = 1.0f) {
  for (size_t block = 0; block < sum.size(); ++block) {
    for (size_t i = 0; i < sum[block].size(); ++i) sum[block][i] += factor * added[block][i];
  }
}

float distance(const Blocks& left, const Blocks& right) {
  float most = 0.0f;
  for (size_t block = 0; block < left.size(); ++block) {
    for (size_t i = 0; i < left[block].size(); ++i) most = std::max(most, std::abs(left[block][i] - right[block][i]));
  }
  return most;
}

int64_t version_of(const std::shared_ptr<Ticket>& ticket) {
  EXPECT_EQ(ticket->versions().lowest, ticket->versions().highest);
  return ticket->versions().lowest;
}

void expect_part(const std::string& text, const std::string& part) { EXPECT_NE(text.find(part), std::string::npos) << text; }

void in_threads(const std::vector<int>& numbers, const std::function<void(int)>& call) {
  std::vector<std::thread> threads;
  for (const int number : numbers) threads.emplace_back(call, number);
  for (std::thread& thread : threads) thread.join();
}

std::shared_ptr<Ticket> push_block(const Store& store, int rank, int block, int64_t clock, Floats gradient, double lr = 1.0) {
  const Client::Item item{block, {gradient.data(), Dtype::fp32}};
  return store.node(rank).push(clock, {&item, 1}, 1.0f, {lr}, false);
}

std::shared_ptr<Ticket> pull_block(const Store& store, int rank, int block, int64_t clock) {
  const auto into = std::make_shared<Floats>(store.setup.values[static_cast<size_t>(block)].size());
  const Client::Item item{block, {into->data(), Dtype::fp32}};
  return store.node(rank).pull(clock, any_staleness, {&item, 1}, into);
}

// Of a bare rank.
void send(comm::Mailbox& from, int to, const std::vector<std::byte>& fields, const std::vector<std::byte>& data = {}) {
  const comm::Mailbox::Bytes piece{data.data(), std::ssize(data)};
  EXPECT_EQ(from.send(to, {fields.data(), std::ssize(fields)}, {&piece, 1}), comm::Mailbox::SendResult::taken);
}

struct Received {
  Message message;
  int64_t bytes = 0;  // of data
};
Received next(comm::Mailbox& mailbox) {
  auto event = mailbox.receive(late());
  while (event && event->kind != comm::Mailbox::Event::Kind::message) event = mailbox.receive(late());
  if (!event) throw std::runtime_error("nothing has come");
  const Unpacked found = unpack({event->data.get(), static_cast<size_t>(event->bytes)});
  return {found.message, std::ssize(found.data)};
}

class PsNodeSums : public testing::TestWithParam<std::tuple<int, bool, bool>> {};

TEST_P(PsNodeSums, AreExactAndOfTheClockOfThePull) {
  const auto [count, all_serve, lockstep] = GetParam();
  const std::vector<int> workers = first_ranks(count);
  const size_t large = count == 2 ? 300'000 : 70;  // 300'000 elements do not travel with others
  Configuration setup = setup_of(workers, all_serve ? workers : std::vector<int>{count, count + 1}, {5, large, 1, 33});
  setup.options.lockstep = lockstep;
  std::vector<Blocks> expected{setup.values};  // by version
  for (int64_t clock = 0; clock < 3; ++clock) {
    expected.push_back(expected.back());
    for (const int worker : workers) add(expected.back(), gradients(setup, worker, clock));
  }
  Store store(setup);
  in_threads(workers, [&](int rank) {
    for (int64_t clock = 0; clock < 3; ++clock) {
      const auto pushed = store.push(rank, clock, gradients(setup, rank, clock));
      const Store::Pulled pulled = store.begin_pull(rank, clock + 1);
      store.wait(pulled.ticket);
      store.wait(pushed);
      EXPECT_EQ(version_of(pulled.ticket), clock + 1);
      EXPECT_TRUE(*pulled.values == expected[static_cast<size_t>(clock) + 1]);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(PsNode, PsNodeSums, testing::Combine(testing::Values(1, 2, 3), testing::Bool(), testing::Bool()));

// Some of their elements are less than half a step of int8 beside the greatest one, and others are no multiple of it.
Blocks unequal_gradients(const Configuration& setup) {
  Blocks all;
  for (const Floats& value : setup.values) {
    Floats& gradient = all.emplace_back();
    for (size_t i = 0; i < value.size(); ++i) gradient.push_back(i == 0 ? 1.0f : 0.003f * static_cast<float>(i % 9 + 1));
  }
  return all;
}

TEST(PsNode, WorkersInLockstepHoldWhatTheServerThinksThatTheyHold) {
  constexpr int clocks = 20;
  Configuration setup = setup_of(first_ranks(3), {0, 2}, {5, 300, 1});
  setup.push_codec = setup.pull_codec = "int8";
  setup.options.lockstep = true;
  Store store(setup);
  const Blocks gradient = unequal_gradients(setup);
  std::vector<std::vector<Blocks>> held(3);  // by rank, after each clock
  in_threads(setup.workers, [&](int rank) {
    for (int64_t clock = 0; clock < clocks; ++clock) {
      store.push(rank, clock, gradient);
      held[static_cast<size_t>(rank)].push_back(store.pull(rank, clock + 1));
      // It is answered by the values that the server thinks the worker has.
      EXPECT_TRUE(store.pull(rank, clock + 1) == held[static_cast<size_t>(rank)].back()) << "rank " << rank << ", clock " << clock;
    }
  });
  EXPECT_TRUE(held[1] == held[0]);
  EXPECT_TRUE(held[2] == held[0]);
  Blocks exact = setup.values;
  add(exact, gradient, 3 * clocks);
  EXPECT_LT(distance(store.values(), exact), 0.03f);  // what one push of each worker loses; without feedback 60 of them lose 0.18
  EXPECT_LT(distance(store.values(), held[0].back()), 0.03f);
}

TEST(PsNode, WhatAPullLosesIsInTheNextOne) {
  Configuration setup = without_threads(asynchronous(setup_of({0, 1}, {0, 1}, {5, 300, 1})));
  setup.push_codec = setup.pull_codec = "int8";
  Store store(setup);
  for (int64_t clock = 0; clock < 4; ++clock) {
    for (const int rank : setup.workers) {
      store.push(rank, clock, unequal_gradients(setup));
      store.pull(rank, clock + 1, any_staleness);
    }
  }
  for (const int rank : setup.workers) {
    Blocks held;
    for (int again = 0; again < 8; ++again) held = store.pull(rank, 4, any_staleness);
    EXPECT_LT(distance(held, store.values()), 4e-6f) << "rank " << rank;
  }
}

TEST(PsNode, AnAsynchronousWorkerWaitsOnlyForItself) {
  const Configuration setup = without_threads(asynchronous(setup_of({0, 1}, {0, 1})));
  Store store(setup);
  Blocks expected = setup.values;
  for (int64_t clock = 0; clock < 3; ++clock) {
    store.wait(store.push(0, clock, gradients(setup, 0, clock), 2.0f, 0.5));
    add(expected, gradients(setup, 0, clock));
    for (const int rank : setup.workers) {
      const Store::Pulled pulled = store.begin_pull(rank, rank == 0 ? clock + 1 : 0, any_staleness);
      store.wait(pulled.ticket);
      EXPECT_EQ(version_of(pulled.ticket), clock + 1);
      EXPECT_EQ(*pulled.values, expected);
    }
  }
  const Store::Pulled early = store.begin_pull(1, 1, any_staleness);
  store.poll();
  EXPECT_FALSE(early.ticket->is_done());
  store.wait(store.push(1, 0, gradients(setup, 1, 0)));
  add(expected, gradients(setup, 1, 0));
  EXPECT_EQ(*early.values, expected);
}

TEST(PsNode, AReaderIsAheadByItsStaleness) {
  const Configuration setup = asynchronous(setup_of({1, 2}, {0}));
  Store store(setup);
  for (int64_t clock = 0; clock < 3; ++clock) {
    store.push(1, clock, gradients(setup, 1, clock));
    if (clock < 2) store.pull(1, clock + 1, 2);
  }
  store.begin_pull(2, 1, any_staleness);  // it waits, too
  const Store::Pulled pulled = store.begin_pull(1, 3, 2);
  EXPECT_EQ(store.node(1).reasons(pulled.ticket, milliseconds(100'000)), "the server of rank 0 waits for pushes of rank 2");
  EXPECT_FALSE(pulled.ticket->is_done());
  store.push(2, 0, gradients(setup, 2, 0));
  store.wait(pulled.ticket);
  EXPECT_EQ(version_of(pulled.ticket), 4);
}

TEST(PsNode, AQuorumOfTwoOfThreeMakesAVersion) {
  Configuration setup = without_threads(setup_of({0, 1, 2}, {0}));
  setup.options.quorum = 2;
  Store store(setup);
  Blocks expected = setup.values;
  std::vector<int64_t> clocks(3);
  for (const int rank : {0, 2, 1, 0, 0, 1}) {  // versions of 0 and 2, of 1 and 0, of 0 and 1
    int64_t& clock = clocks[static_cast<size_t>(rank)];
    store.wait(store.push(rank, clock, gradients(setup, rank, clock)));
    ++clock;
    const Store::Pulled pulled = store.begin_pull(rank, clock, any_staleness);
    store.wait(pulled.ticket);
    const int64_t pushes = clocks[0] + clocks[1] + clocks[2];
    EXPECT_EQ(version_of(pulled.ticket), pushes / 2);
    if (pushes % 2 == 0) {
      expected = setup.values;
      for (const int worker : setup.workers) {
        for (int64_t i = 0; i < clocks[static_cast<size_t>(worker)]; ++i) add(expected, gradients(setup, worker, i));
      }
    }
    EXPECT_EQ(*pulled.values, expected);
  }
}

TEST(PsNode, ASkippedPushCountsAndChangesNothing) {
  for (const int quorum : {Core::all, 1}) {
    Configuration setup = without_threads(setup_of({0, 1}, {0, 1}));
    setup.options.quorum = quorum;
    Store store(setup);
    Blocks expected = setup.values;
    for (int64_t clock = 0; clock < 2; ++clock) {
      const bool skips = clock == 0;
      store.push(1, clock, gradients(setup, 1, clock));
      store.push(0, clock, gradients(setup, 0, clock), 1.0f, 1.0, skips);
      if (quorum == 1 || !skips) add(expected, gradients(setup, 1, clock));
      if (!skips) add(expected, gradients(setup, 0, clock));
      const Store::Pulled pulled = store.begin_pull(0, clock + 1, 0);
      store.wait(pulled.ticket);
      EXPECT_EQ(version_of(pulled.ticket), (clock + 1) * (quorum == 1 ? 2 : 1));
      EXPECT_EQ(pulled.ticket->versions().skipped, skips);
      EXPECT_EQ(*pulled.values, expected);
    }
  }
}

TEST(PsNode, EachPushHasItsRate) {
  Configuration setup = without_threads(setup_of({0, 1}, {0}, {3, 3}));
  setup.options.quorum = 2;
  Store store(setup);
  push_block(store, 0, 0, 0, Floats(3, 1.0f), 1.0);
  push_block(store, 1, 1, 0, Floats(3, 1.0f), 4.0);
  store.poll();
  EXPECT_EQ(store.values(), setup.values);
  store.node(1).close(milliseconds(0));  // now one push makes a version
  store.poll();
  EXPECT_EQ(store.values(), (Blocks{Floats(3, 3.0f), Floats(3, 6.0f)}));

  push_block(store, 0, 0, 2, Floats(3, 1.0f), 8.0);
  store.poll();
  push_block(store, 0, 1, 0, Floats(3, 1.0f), 1.0);
  store.push(0, 1, {Floats(3, 1.0f), Floats(3, 1.0f)}, 1.0f, 2.0);
  store.poll();
  EXPECT_EQ(store.values(), (Blocks{Floats(3, 13.0f), Floats(3, 9.0f)}));
}

TEST(PsNode, APushBeyondTheWindowIsRefusedAndWhatFollowsFails) {
  for (const bool has_threads : {false, true}) {
    Configuration setup = setup_of({0, 1}, {1});
    setup.has_threads = has_threads;
    setup.options.window = 2;
    Store store(setup);
    for (int64_t clock = 0; clock < 2; ++clock) store.wait(store.push(0, clock, gradients(setup, 0, clock)));
    const Store::Pulled waiting = store.begin_pull(0, 1);
    const auto refused = store.push(0, 2, gradients(setup, 0, 2));
    if (!has_threads) store.poll();
    const std::string why =
        "the server of rank 1 refuses what this worker sends: push of clock 2: expected one that is less than 2 clocks ahead of what is "
        "applied, 0";
    EXPECT_EQ(failure(refused), why);
    EXPECT_EQ(failure(waiting.ticket), why);
    EXPECT_EQ(thrown([&] { store.push(0, 3, gradients(setup, 0, 3)); }), why);
    EXPECT_EQ(thrown([&] { store.begin_pull(0, 0); }), why);
    EXPECT_EQ(thrown([&] { store.node(0).save(true); }), why);

    Blocks expected = setup.values;  // of what was taken
    for (int64_t clock = 0; clock < 2; ++clock) {
      store.push(1, clock, gradients(setup, 1, clock));
      for (const int rank : setup.workers) add(expected, gradients(setup, rank, clock));
    }
    EXPECT_EQ(store.pull(1, 2), expected);
  }
}

TEST(PsNode, ALostWorkerIsNamedToThoseThatNeedIt) {
  for (const bool is_killed : {true, false}) {
    Configuration setup = setup_of({1, 2, 3}, {0});
    if (is_killed) setup.bare = {2};
    Store store(setup);
    store.push(1, 0, gradients(setup, 1, 0));
    store.push(3, 0, gradients(setup, 3, 0));
    const Store::Pulled first = store.begin_pull(1, 1), second = store.begin_pull(3, 1);
    is_killed ? store.mailboxes[2].reset() : store.node(2).close(milliseconds(0));
    const std::string why = text("the worker of rank 2 has left: ", is_killed ? "it has dropped its mailbox" : "it has closed its store");
    EXPECT_EQ(failure(first.ticket), why);
    EXPECT_EQ(failure(second.ticket), why);
    EXPECT_EQ(failure(store.begin_pull(3, 1).ticket), why);
    store.wait(store.push(1, 1, gradients(setup, 1, 1)));
    EXPECT_EQ(store.pull(1, 0), setup.values);
  }
}

TEST(PsNode, AsynchronousWorkersGoOnWithoutALostOne) {
  for (const auto& [quorum, staleness] :
       {std::pair{1, any_staleness}, std::pair{1, std::optional<int64_t>(0)}, std::pair{3, any_staleness}}) {
    Configuration setup = setup_of({1, 2, 3}, {0});
    setup.bare = {2};
    setup.options.quorum = quorum;
    Store store(setup);
    Blocks expected = setup.values;
    for (const int rank : {1, 3}) store.push(rank, 0, gradients(setup, rank, 0));
    const Store::Pulled waiting = store.begin_pull(1, 1, staleness);
    store.mailboxes[2].reset();
    store.wait(waiting.ticket);
    for (const int rank : {1, 3}) {
      store.push(rank, 1, gradients(setup, rank, 1));
      for (int64_t clock = 0; clock < 2; ++clock) add(expected, gradients(setup, rank, clock));
    }
    for (const int rank : {1, 3}) store.pull(rank, 2, quorum == 1 ? 0 : staleness);
    EXPECT_EQ(store.pull(1, 2, any_staleness), expected);
  }
}

TEST(PsNode, ALostServerIsNamedWithTheNumberOfItsBlocks) {
  Configuration setup = asynchronous(setup_of({0, 2}, {0, 1}));
  setup.bare = {1};
  Store store(setup);
  const Store::Pulled pulled = store.begin_pull(2, 0);
  const auto pushed = store.push(0, 0, gradients(setup, 0, 0));
  store.mailboxes[1].reset();
  const std::string why = "the server of rank 1 is lost, and with it 1 of 3 blocks of the store: it has dropped its mailbox";
  EXPECT_EQ(failure(pulled.ticket), why);
  EXPECT_EQ(failure(pushed), why);
  EXPECT_EQ(thrown([&] { store.push(0, 1, gradients(setup, 0, 1)); }), why);
  EXPECT_EQ(thrown([&] { store.begin_pull(2, 0); }), why);
  store.wait(push_block(store, 2, 0, 0, Floats(5)));
  store.wait(pull_block(store, 2, 2, 0));
}

// Pushes and pulls one block until a call fails. Returns what it says.
std::string work_until_failure(const Store& store, int rank, int block, const std::function<void(int64_t)>& after_round) {
  return thrown([&] {
    for (int64_t clock = 0;; ++clock) {
      const auto pushed = push_block(store, rank, block, clock, Floats(store.setup.values[static_cast<size_t>(block)].size(), 1.0f));
      const auto pulled = pull_block(store, rank, block, clock + 1);
      for (const auto& ticket : {pushed, pulled}) {
        if (!ticket->wait(late())) throw std::logic_error("it is not complete");
      }
      after_round(clock);
    }
  });
}

constexpr int64_t some_rounds = 20, many_rounds = 300;

TEST(PsNode, ClosesWhilePushesAndPullsAreUnderWay) {
  Store store(asynchronous(setup_of({0, 1}, {0, 1}, {50, 50, 50, 50})));
  std::latch are_under_way(8);
  std::thread closing([&] {
    are_under_way.wait();
    store.node(0).close(milliseconds(0));
  });
  in_threads(first_ranks(8), [&](int thread) {
    const int rank = thread / 4, block = thread % 4;
    const std::string why = work_until_failure(store, rank, block, [&](int64_t clock) {
      if (clock == some_rounds) are_under_way.count_down();
      if (clock == many_rounds && rank == 1 && block % 2 == 1) throw std::runtime_error("it goes on");
    });
    if (rank == 0) {
      EXPECT_EQ(why, "the store is closed");
    } else {
      EXPECT_EQ(why, block % 2 == 1 ? "it goes on"
                                    : "the server of rank 0 is lost, and with it 2 of 4 blocks of the store: it has closed its store");
    }
  });
  closing.join();
  store.node(0).close(milliseconds(0));
  EXPECT_EQ(thrown([&] { pull_block(store, 0, 1, 0); }), "the store is closed");
}

TEST(PsNode, TwoThreadsOfAWorkerGoOnWhilePeersAreLost) {
  Configuration setup = asynchronous(setup_of({0, 2}, {0, 1}, {50, 50, 50}));
  setup.push_codec = setup.pull_codec = "int8";
  Store store(setup);
  std::latch are_under_way(3);
  std::thread losing([&] {
    are_under_way.wait();
    store.nodes[1].reset();
    store.nodes[2].reset();
  });
  in_threads({0, 1, 2}, [&](int block) {
    const std::string why = work_until_failure(store, 0, block, [&](int64_t clock) {
      if (clock == some_rounds) are_under_way.count_down();
      if (clock == many_rounds && block != 1) throw std::runtime_error("it goes on");
    });
    EXPECT_EQ(why,
              block != 1 ? "it goes on" : "the server of rank 1 is lost, and with it 1 of 3 blocks of the store: it has closed its store");
  });
  losing.join();
}

TEST(PsNode, FinishesWhenAllWorkersHaveFinished) {
  Store store(setup_of({0, 1}, {0, 2}));
  EXPECT_FALSE(store.node(0).finish(Clock::now()));
  EXPECT_FALSE(store.node(2).finish(Clock::now()));
  EXPECT_TRUE(store.node(1).finish(late()));  // it serves none
  EXPECT_TRUE(store.node(0).finish(late()));
  EXPECT_TRUE(store.node(2).finish(late()));
}

TEST(PsNode, ClosingEndsAWaitForTheOthersToFinish) {
  Configuration setup = setup_of({0, 1}, {0, 1});
  setup.bare = {1};
  Store store(setup);
  std::thread finishing([&] {
    const Deadline deadline = late();
    EXPECT_TRUE(store.node(0).finish(deadline));
    EXPECT_LT(Clock::now(), deadline);
  });
  EXPECT_EQ(next(*store.mailboxes[1]).message.kind, Kind::done);
  store.node(0).close(milliseconds(0));
  finishing.join();
}

TEST(PsNode, DoesNotWaitBeyondTheDeadlineForAServerThatIsBehind) {
  Configuration setup = setup_of({0}, {1}, {300'000});
  setup.bare = {1};
  setup.limit = 1 << 20;
  Store store(setup);
  store.push(0, 0, gradients(setup, 0, 0));
  EXPECT_FALSE(store.node(0).finish(Clock::now()));
  EXPECT_EQ(next(*store.mailboxes[1]).message.kind, Kind::push);
  EXPECT_TRUE(store.node(0).finish(late()));
  EXPECT_EQ(next(*store.mailboxes[1]).message.kind, Kind::done);
}

TEST(PsNode, AThreadThatPushesGivesUpAServerThatIsBehindForTooLong) {
  Configuration setup = setup_of({0}, {1}, {300'000});
  setup.bare = {1};
  setup.limit = 1 << 20;
  setup.has_threads = false;
  Store store(setup);
  store.node(0).start([](double waited) { return waited >= 0.3; });
  store.push(0, 0, gradients(setup, 0, 0));
  EXPECT_THROW(store.push(0, 1, gradients(setup, 0, 1)), std::runtime_error);
}

TEST(PsNode, AThreadThatPushesWaitsForAServerThatIsBehind) {
  Configuration setup = setup_of({0}, {1}, {300'000});
  setup.bare = {1};
  setup.limit = 1 << 20;
  Store store(setup);
  std::thread pushing([&] {
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (int64_t clock = 0; clock < 5; ++clock) tickets.push_back(store.push(0, clock, gradients(setup, 0, clock)));
    for (const auto& ticket : tickets) store.wait(ticket);
  });
  for (int64_t clock = 0; clock < 5; ++clock) {
    const Received received = next(*store.mailboxes[1]);
    EXPECT_EQ(received.message.clock, clock);
    EXPECT_EQ(received.bytes, 1'200'000);
    send(*store.mailboxes[1], 0, pack({.kind = Kind::accepted, .id = received.message.id}));
  }
  pushing.join();
}

TEST(PsNode, AServerDoesNotWaitForAWorkerThatIsBehind) {
  Configuration setup = asynchronous(setup_of({0, 1}, {0}, {300'000}));
  setup.bare = {1};
  setup.limit = 1 << 20;
  Store store(setup);
  comm::Mailbox& bare = *store.mailboxes[1];
  for (int64_t id = 0; id < 4; ++id) send(bare, 0, pack({.kind = Kind::pull, .id = id, .staleness = 0, .blocks = {0}, .numbers = {1}}));
  for (int64_t id = 4; id < 8; ++id) {  // these wait for a push, whose thread then sends the answers
    send(bare, 0, pack({.kind = Kind::pull, .id = id, .clock = 1, .staleness = 0, .blocks = {0}, .numbers = {1}}));
  }
  send(bare, 0, pack({.kind = Kind::push, .id = 8, .skips = true, .blocks = {0}, .rates = {1.0}}));
  const auto expect_values = [&](int64_t first) {
    for (int64_t id = first; id < first + 4; ++id) {
      const Received received = next(bare);
      EXPECT_EQ(received.message.id, id);
      EXPECT_EQ(received.bytes, 1'200'000);
    }
  };
  expect_values(0);
  EXPECT_EQ(next(bare).message.kind, Kind::accepted);
  store.push(0, 0, gradients(setup, 0, 0));
  expect_values(4);
}

TEST(PsNode, ClosingEndsAPushThatWaitsForAPeerThatIsBehind) {
  Configuration setup = asynchronous(setup_of({0, 1}, {0, 1}, {300'000, 1}));
  setup.bare = {1};
  setup.limit = 1 << 20;
  Store store(setup);
  for (int64_t id = 0; id < 2; ++id) send(*store.mailboxes[1], 0, pack({.kind = Kind::pull, .id = id, .blocks = {0}, .numbers = {1}}));
  store.wait(pull_block(store, 0, 0, 0));  // by now the second answer to the peer waits
  std::latch is_about_to_push(1);
  std::thread pushing([&] {
    is_about_to_push.count_down();
    EXPECT_EQ(thrown([&] { push_block(store, 0, 1, 0, Floats(1))->wait(late()); }), "the store is closed");
  });
  is_about_to_push.wait();
  store.node(0).close(milliseconds(0));
  pushing.join();
}

Configuration adam_setup() {
  Configuration setup = without_threads(setup_of({0, 1}, {0, 1}));
  setup.rule = {.name = "adam", .hyper = {}, .states = {"exp_avg", "exp_avg_sq"}};
  setup.counters = 1;
  return setup;
}

Blocks train(Store& store, int64_t from, int64_t clocks, int64_t of_gradient) {
  for (int64_t clock = from; clock < from + clocks; ++clock) {
    for (const int rank : {0, 1}) store.push(rank, clock, gradients(store.setup, rank, of_gradient + clock - from), 1.0f, 0.1);
  }
  return store.pull(1, from + clocks);
}

TEST(PsNode, ARestoredStoreGoesOnWithTheSameBits) {
  Store store(adam_setup());
  train(store, 0, 3, 0);
  const auto saved = store.node(0).save(true);
  store.poll();
  EXPECT_FALSE(saved->is_done());  // the other worker might push
  store.wait(store.node(1).save(false));
  store.wait(saved);
  ASSERT_EQ(saved->states().size(), 2U);

  Store restored(adam_setup());
  for (const Ticket::State& state : saved->states()) {
    EXPECT_EQ(state.versions, std::vector<int64_t>(state.server == 0 ? 2 : 1, 3));
    restored.node(0).restore(state.server, true, {state.numbers.data(), std::ssize(state.numbers), {}});
  }
  EXPECT_EQ(restored.pull(0, 0), store.pull(0, 3));
  EXPECT_EQ(train(restored, 0, 2, 3), train(store, 3, 2, 3));

  const Ticket::State& state = saved->states().front();
  restored.node(0).restore(state.server, true, {state.numbers.data(), std::ssize(state.numbers), {}});
  restored.poll();
  expect_part(thrown([&] { restored.push(0, 2, gradients(restored.setup, 0, 0)); }), "expected a store into which nothing was pushed");
}

TEST(PsNode, ASaveDoesNotWaitForALostWorker) {
  Store store(setup_of({0, 1}, {0}));
  const auto saved = store.node(0).save(true);
  store.node(1).close(milliseconds(0));
  store.wait(saved);
  EXPECT_EQ(saved->states().size(), 1U);
}

TEST(PsNode, AReplayInAnotherOrderOfArrivalHasTheSameBits) {
  constexpr int64_t clocks = 8;
  Configuration setup = asynchronous(setup_of({0, 1, 2}, {0, 1}));
  setup.push_codec = setup.pull_codec = "int8";
  setup.options.delay_compensation = 0.1f;
  setup.options.records = true;
  Store store(setup);
  std::vector<std::vector<Blocks>> pulled(3);  // by rank
  in_threads(setup.workers, [&](int rank) {
    for (int64_t clock = 0; clock < clocks; ++clock) {
      store.push(rank, clock, gradients(setup, rank, clock));
      pulled[static_cast<size_t>(rank)].push_back(store.pull(rank, clock + 1, any_staleness));
    }
  });

  Configuration again = without_threads(setup);
  for (const int rank : setup.servers) again.replayed[rank] = store.record(rank);
  Store replay(again);
  std::vector<std::vector<Store::Pulled>> replayed(3);
  for (const int rank : {2, 1, 0}) {
    for (int64_t clock = 0; clock < clocks; ++clock) {
      replay.push(rank, clock, gradients(setup, rank, clock));
      replayed[static_cast<size_t>(rank)].push_back(replay.begin_pull(rank, clock + 1, any_staleness));
    }
    replay.poll();
  }
  for (size_t rank = 0; rank < 3; ++rank) {
    for (size_t clock = 0; clock < clocks; ++clock) {
      replay.wait(replayed[rank][clock].ticket);
      EXPECT_EQ(*replayed[rank][clock].values, pulled[rank][clock]) << "rank " << rank << ", clock " << clock;
    }
  }
  EXPECT_EQ(replay.values(), store.values());
  for (const int rank : setup.servers) EXPECT_EQ(replay.record(rank), again.replayed[rank]);
  replay.wait(replay.push(2, clocks, gradients(setup, 2, clocks)));  // it is handled, although no record has it
}

TEST(PsNode, AReplayLosesAWorkerWhereTheRecordDoes) {
  const auto values_of = [](std::vector<int> order, std::vector<Handled> replayed, std::vector<Handled>& record) {
    Configuration setup = without_threads(setup_of({0, 1}, {0}, {3}));
    setup.options.quorum = 2;
    setup.options.records = true;
    setup.replayed[0] = std::move(replayed);
    Store store(setup);
    for (const int rank : order) {
      if (rank == 0) {
        for (int64_t clock = 0; clock < 2; ++clock) store.push(0, clock, {Floats(3, 1.0f)}, 1.0f, 1.0 + static_cast<double>(clock));
      } else {
        store.push(1, 0, {Floats(3, 8.0f)}, 1.0f, 4.0);
        store.poll();
        store.node(1).close(milliseconds(0));
      }
      store.poll();
    }
    record = store.record(0);
    return store.values()[0][0];
  };
  std::vector<Handled> record, again;
  EXPECT_EQ(values_of({0, 1}, {}, record), 2.0f + 9.0f * 4.0f + 2.0f);
  EXPECT_EQ(values_of({1, 0}, {}, again), 2.0f + 8.0f * 4.0f + 1.0f + 2.0f);
  EXPECT_EQ(values_of({1, 0}, record, again), 2.0f + 9.0f * 4.0f + 2.0f);
  EXPECT_EQ(again, record);
}

class Failing final : public Updater {
 public:
  explicit Failing(std::vector<Slot> slots) : slots_(std::move(slots)) {}
  std::vector<Slot>& slots() override { return slots_; }
  void step(const ExecutionContext&, std::span<const Item>, double, double) override { throw std::runtime_error("it has no memory"); }

 private:
  std::vector<Slot> slots_;
};

TEST(PsNode, AServerThatFailsTellsAllWorkers) {
  Configuration setup = setup_of({1, 2}, {0});
  setup.make_updater = [](std::vector<Updater::Slot> slots) { return std::make_unique<Failing>(std::move(slots)); };
  Store store(setup);
  for (const int rank : setup.workers) store.push(rank, 0, gradients(setup, rank, 0));
  for (const int rank : setup.workers) {
    const std::string why =
        text("the server of rank 0 refuses what this worker sends: what rank ", rank, " sent could not be handled: it has no memory");
    EXPECT_EQ(thrown([&] { store.begin_pull(rank, 1).ticket->wait(late()); }), why);
  }
}

std::vector<std::byte> start_of(std::vector<std::byte> bytes, size_t count) {
  bytes.resize(count);
  return bytes;
}

TEST(PsNode, AWorkerLearnsThatItsMessageIsMalformed) {
  Configuration setup = without_threads(asynchronous(setup_of({0, 1}, {0})));
  setup.bare = {1};
  Store store(setup);
  comm::Mailbox& bare = *store.mailboxes[1];
  const Message push{.kind = Kind::push, .blocks = {0, 2}, .rates = {1.0}};
  const auto changed = [&](const std::function<void(Message&)>& change) {
    Message message = push;
    change(message);
    return pack(message);
  };
  std::vector<std::byte> of_another_version = pack(push);
  of_another_version[0] ^= std::byte{1};
  const std::vector<std::byte> none, some(128);
  const std::tuple<std::vector<std::byte>, std::vector<std::byte>, std::string> cases[] = {
      {none, none, "more bytes, got 0"},
      {start_of(pack(push), 90), none, "message: expected"},
      {start_of(pack(push), pack(push).size() - 1), none, "message: expected"},
      {of_another_version, some, "message: expected one of this version"},
      {changed([](Message& its) { its.kind = static_cast<Kind>(77); }), some, "message: expected none for a worker"},
      {changed([](Message& its) { its.kind = Kind::values; }), some, "message: expected none for a worker"},
      {changed([](Message& its) { its.blocks[1] = 3; }), some, "blocks: expected numbers below 3, got 3"},
      {changed([](Message& its) { its.blocks[0] = -1; }), some, "blocks: expected numbers below 3, got -1"},
      {changed([](Message& its) { its.blocks.clear(); }), none, "blocks: expected at least one"},
      {changed([](Message& its) { its.clock = -1; }), some, "clock: expected at least 0, got -1"},
      {changed([](Message& its) { its.rates.clear(); }), some, "rates: expected 1, got 0"},
      {changed([](Message& its) { its.weight = 0.0f; }), some, "weight: expected a finite number > 0, got 0"},
      {changed([](Message& its) { its.weight = -1.0f; }), some, "weight: expected a finite number > 0, got -1"},
      {changed([](Message& its) { its.weight = std::nanf(""); }), some, "weight: expected a finite number > 0, got nan"},
      {changed([](Message& its) { its.skips = true; }), some, "push: expected 0 bytes, got 128"},
      {pack(push), start_of(some, 127), "push: expected 128 bytes, got 127"},
      {pack(push), none, "push: expected 128 bytes, got 0"},
      {pack({.kind = Kind::pull, .blocks = {7}}), none, "blocks: expected numbers below 3, got 7"},
      {pack({.kind = Kind::pull}), none, "blocks: expected at least one"},
      {pack({.kind = Kind::pull, .clock = -5, .blocks = {0}}), none, "clock: expected at least 0, got -5"},
      {pack({.kind = Kind::pull, .blocks = {0, 1}}), none, "pull: expected parts with all blocks, got 2 too few"},
      {pack({.kind = Kind::pull, .blocks = {0, 1}, .numbers = {1, 2}}), none, "pull: expected parts of 1 to 1 blocks, got 2"},
      {pack({.kind = Kind::pull, .blocks = {0, 1}, .numbers = {2, 0}}), none, "pull: expected parts of 1 to 0 blocks, got 0"},
      {pack({.kind = Kind::question, .blocks = {7}}), none, "blocks: expected numbers below 3, got 7"},
      {pack({.kind = Kind::restore}), some, "restore: expected 304 bytes, got 128"},
  };
  for (const auto& [fields, data, expected] : cases) {
    send(bare, 0, fields, data);
    store.poll();
    const Message answer = next(bare).message;
    EXPECT_EQ(answer.kind, Kind::failed);
    EXPECT_EQ(answer.id, -1);
    expect_part(answer.text, "what rank 1 sent could not be handled: ");
    expect_part(answer.text, expected);
  }
  store.push(0, 0, gradients(setup, 0, 0));
  Blocks expected = setup.values;
  add(expected, gradients(setup, 0, 0));
  EXPECT_EQ(store.pull(0, 1, any_staleness), expected);
  send(bare, 0, pack(push), some);
  store.poll();
  EXPECT_EQ(next(bare).message.kind, Kind::accepted);
}

TEST(PsNode, AServerThatAnswersMalformedMessagesIsGivenUp) {
  Configuration setup = without_threads(setup_of({0}, {1}, {16}));
  setup.bare = {1};
  const std::vector<std::byte> none, all(64), too_few(60);
  const std::tuple<Message, std::vector<std::byte>, std::string> cases[] = {
      {{.kind = Kind::values, .id = 0}, too_few, "values: expected 64 bytes, got 60"},
      {{.kind = Kind::values, .id = 0}, none, "values: expected 64 bytes, got 0"},
      {{.kind = Kind::values, .id = 0, .differs = true}, all, "values: expected all of them, got a difference"},
      {{.kind = Kind::values, .id = 1}, all, "message: expected the answer to a push or a pull, got kind 3 with id 1"},
      {{.kind = Kind::values, .id = -1}, all, "message: expected the answer to a push or a pull, got kind 3 with id -1"},
      {{.kind = Kind::accepted, .id = 0}, none, "message: expected the answer to a push or a pull, got kind 1 with id 0"},
      {{.kind = Kind::state, .id = 0}, none, "message: expected the answer to a push or a pull, got kind 9 with id 0"},
      {{.kind = static_cast<Kind>(-3), .id = 0}, none, "message: expected the answer to a push or a pull, got kind -3 with id 0"},
      {{.kind = Kind::push, .id = 0}, none, "message: expected none for a server"},
  };
  const auto expect_failure = [&](const std::vector<std::byte>& fields, const std::vector<std::byte>& data, const std::string& expected) {
    Store store(setup);
    const auto ticket = store.begin_pull(0, 0).ticket;
    EXPECT_EQ(next(*store.mailboxes[1]).message.id, 0);
    send(*store.mailboxes[1], 0, pack({.kind = Kind::reasons, .id = 5, .numbers = {1}}));  // it asked for none
    store.poll();
    EXPECT_FALSE(ticket->is_done());
    send(*store.mailboxes[1], 0, fields, data);
    store.poll();
    ASSERT_TRUE(ticket->is_done()) << expected;
    expect_part(failure(ticket), expected);
    expect_part(thrown([&] { store.push(0, 0, gradients(setup, 0, 0)); }), "the server of rank 1 is lost");
  };
  for (const auto& [message, data, expected] : cases) expect_failure(pack(message), data, expected);
  expect_failure(none, none, "what rank 1 sent could not be handled: message: expected");
  expect_failure(start_of(pack({.kind = Kind::values}), 100), none, "what rank 1 sent could not be handled: message: expected");
}

TEST(PsNode, ReasonsEndWithAnyAnswerOrWithTheServer) {
  for (const bool answers : {true, false}) {
    Configuration setup = setup_of({0}, {1});
    setup.bare = {1};
    Store store(setup);
    const Store::Pulled pulled = store.begin_pull(0, 0);
    std::thread asking([&] {
      const Deadline deadline = late();
      EXPECT_EQ(store.node(0).reasons(pulled.ticket, milliseconds(100'000)),
                answers ? "the server of rank 1 waits for pushes of rank 99, -1" : "the server of rank 1 does not answer");
      EXPECT_LT(Clock::now(), deadline);
    });
    for (const Kind kind : {Kind::pull, Kind::question}) EXPECT_EQ(next(*store.mailboxes[1]).message.kind, kind);
    if (answers) send(*store.mailboxes[1], 0, pack({.kind = Kind::reasons, .id = 0, .numbers = {99, -1}}));
    if (!answers) store.mailboxes[1].reset();
    asking.join();
  }
}

std::vector<std::byte> with_a_change(std::vector<std::byte> bytes, std::mt19937& random) {
  bytes[random() % bytes.size()] ^= static_cast<std::byte>(1U << (random() % 8));
  if (random() % 8 == 0) bytes.resize(random() % bytes.size());
  return bytes;
}

// The sanitizers see what follows from them.
TEST(PsNode, TakesNoHarmFromChangedMessages) {
  Configuration setup = without_threads(asynchronous(setup_of({0, 2}, {0, 1}, {16, 16, 16})));
  setup.bare = {1, 2};
  setup.push_codec = setup.pull_codec = "int8";
  std::mt19937 random(1);
  std::vector<std::byte> data(static_cast<size_t>(aligned(find_codec("int8").bytes(16))));
  for (int round = 0; round < 500; ++round) {
    Store store(setup);
    const Store::Pulled pulled = store.begin_pull(0, 0);
    for (std::byte& byte : data) byte = static_cast<std::byte>(random());
    const Message asked = next(*store.mailboxes[1]).message;
    send(*store.mailboxes[1], 0,
         with_a_change(pack({.kind = Kind::values, .id = asked.id, .differs = true, .blocks = {0}, .numbers = {1}}), random), data);
    for (const Message& message : {Message{.kind = Kind::push, .blocks = {0}, .rates = {1.0}},
                                   Message{.kind = Kind::pull, .id = 3, .staleness = 1, .blocks = {0, 1}, .numbers = {1, 1}}}) {
      send(*store.mailboxes[2], 0, with_a_change(pack(message), random), message.kind == Kind::push ? data : std::vector<std::byte>());
    }
    store.wait(pull_block(store, 0, 2, 0));
    if (pulled.ticket->is_done()) thrown([&] { pulled.ticket->wait(Clock::now()); });
  }
}

}  // namespace
}  // namespace dltrain::ps
