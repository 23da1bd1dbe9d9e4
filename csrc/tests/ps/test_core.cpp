// Tests the server's state machine: by hand, by every order of a few messages, and by random schedules of many.

#include "ps/core/core.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <functional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "tests/ps/scheduler.h"

namespace dltrain::ps {
namespace {

constexpr auto all = Core::all;

// "apply 0 v1 w0c0 w1c0; answer 7 w0", the key, the version and the contributions, or the pull and the worker.
std::string describe(const std::vector<Action>& actions) {
  std::string described;
  for (const Action& action : actions) {
    static constexpr const char* names[] = {"apply", "discard", "refuse", "answer", "fail", "wait"};
    described += (described.empty() ? "" : "; ") + std::string(names[static_cast<int>(action.kind)]);
    if (action.kind == Action::Kind::answer || action.kind == Action::Kind::fail) {
      described += text(" ", action.pull, " w", action.worker);
      continue;
    }
    described += text(" ", action.key, " v", action.version);
    for (const auto& [worker, clock, id] : action.contributions) described += text(" w", worker, "c", clock);
  }
  return described;
}

std::string push(Core& core, int key, int worker, int64_t clock) {
  std::vector<Action> actions;
  core.push(key, {worker, clock, 0}, actions);
  return describe(actions);
}

std::string pull(Core& core, int64_t id, int worker, int64_t clock, std::optional<int64_t> staleness = {}, std::vector<int> keys = {0}) {
  std::vector<Action> actions;
  core.pull({id, worker, clock, staleness, std::move(keys)}, actions);
  return describe(actions);
}

std::string applied_pull(Core& core, int64_t id, int worker, int64_t clock, std::vector<int> keys = {0}) {
  std::vector<Action> actions;
  core.pull({id, worker, clock, {}, std::move(keys), true}, actions);
  return describe(actions);
}

std::string elapse(Core& core, int key, int64_t version) {
  std::vector<Action> actions;
  core.elapse(key, version, actions);
  return describe(actions);
}

std::string leave(Core& core, int worker) {
  std::vector<Action> actions;
  core.leave(worker, actions);
  return describe(actions);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "none";
}

TEST(PsCore, MakesVersionsOfAllWorkersInTheirOrder) {
  Core core({3, 2});
  EXPECT_EQ(pull(core, 7, 1, 1, 0, {0, 1}), "");
  EXPECT_EQ(push(core, 0, 2, 0), "");
  EXPECT_EQ(push(core, 0, 1, 1), "");  // early
  EXPECT_EQ(push(core, 0, 1, 0), "");
  EXPECT_EQ(push(core, 0, 2, 0), "discard 0 v0 w2c0");
  EXPECT_EQ(core.lacking(7), (std::vector<int>{0, 1, 2}));  // key 1 has nothing
  EXPECT_EQ(push(core, 0, 0, 0), "apply 0 v1 w0c0 w1c0 w2c0");
  EXPECT_EQ(push(core, 0, 0, 0), "discard 0 v1 w0c0");
  EXPECT_EQ(push(core, 1, 0, 0) + push(core, 1, 1, 0), "");
  EXPECT_EQ(core.lacking(7), (std::vector<int>{2}));
  EXPECT_EQ(push(core, 1, 2, 0), "apply 1 v1 w0c0 w1c0 w2c0; answer 7 w1");
  EXPECT_EQ(push(core, 0, 2, 1), "");
  EXPECT_EQ(push(core, 0, 0, 1), "apply 0 v2 w0c1 w1c1 w2c1");
  EXPECT_EQ(core.version(0), 2);
  EXPECT_EQ(core.applied(1, 2), 1);
}

TEST(PsCore, UsesWhatALostWorkerHasPushedAndFailsWhatNeedsMore) {
  Core core({2, 1});
  push(core, 0, 1, 0);
  push(core, 0, 1, 2);
  push(core, 0, 0, 1);
  EXPECT_EQ(pull(core, 1, 0, 1), "");
  EXPECT_EQ(pull(core, 2, 0, 2), "");
  EXPECT_EQ(pull(core, 3, 1, 1), "");
  EXPECT_EQ(leave(core, 1), "discard 0 v0 w1c2 w0c1; fail 2 w1; fail 3 w1");
  EXPECT_EQ(leave(core, 1), "");
  EXPECT_EQ(push(core, 0, 0, 0), "apply 0 v1 w0c0 w1c0; answer 1 w0");
  EXPECT_EQ(push(core, 0, 0, 1), "discard 0 v1 w0c1");
  EXPECT_EQ(push(core, 0, 1, 1), "discard 0 v1 w1c1");
  EXPECT_EQ(pull(core, 4, 0, 2), "fail 4 w1");
  EXPECT_EQ(pull(core, 4, 1, 0), "fail 4 w1");
  EXPECT_EQ(pull(core, 4, 0, 1), "answer 4 w0");
}

TEST(PsCore, MakesVersionsOfAQuorumInTheOrderOfArrival) {
  Core core({4, 1, 2});
  EXPECT_EQ(push(core, 0, 3, 1), "");
  EXPECT_EQ(push(core, 0, 1, 0), "");
  EXPECT_EQ(push(core, 0, 1, 1), "");
  EXPECT_EQ(push(core, 0, 3, 0), "apply 0 v1 w1c0 w3c0; apply 0 v2 w3c1 w1c1");
  EXPECT_EQ(push(core, 0, 0, 0), "");
  EXPECT_EQ(push(core, 0, 0, 1), "");
  EXPECT_EQ(leave(core, 3) + leave(core, 2), "");
  EXPECT_EQ(leave(core, 1), "apply 0 v3 w0c0; apply 0 v4 w0c1");
}

TEST(PsCore, CountsWhatWaitsForAQuorumOrWorkersCouldWaitForEachOther) {
  Core core({3, 3, 2});
  push(core, 0, 0, 0);
  EXPECT_EQ(push(core, 0, 1, 0), "apply 0 v1 w0c0 w1c0");
  push(core, 1, 0, 0);
  EXPECT_EQ(push(core, 1, 2, 0), "apply 1 v1 w0c0 w2c0");
  push(core, 2, 1, 0);
  EXPECT_EQ(push(core, 2, 2, 0), "apply 2 v1 w1c0 w2c0");
  EXPECT_EQ(pull(core, 0, 0, 1, 0, {0, 1, 2}), "");
  EXPECT_EQ(core.lacking(0), (std::vector<int>{0, 1, 2}));  // each of them at another key
  EXPECT_EQ(push(core, 0, 2, 0) + push(core, 1, 1, 0), "");
  EXPECT_EQ(push(core, 2, 0, 0), "answer 0 w0");
  EXPECT_EQ(core.version(2), 1);
}

TEST(PsCore, BoundsTheStaleness) {
  Core core({3, 1, 1});
  EXPECT_EQ(push(core, 0, 0, 0), "apply 0 v1 w0c0");
  EXPECT_EQ(pull(core, 1, 0, 1, 1), "answer 1 w0");
  EXPECT_EQ(push(core, 0, 0, 1), "apply 0 v2 w0c1");
  EXPECT_EQ(pull(core, 2, 0, 2), "answer 2 w0");
  EXPECT_EQ(pull(core, 3, 0, 2, 1), "");
  EXPECT_EQ(core.lacking(3), (std::vector<int>{1, 2}));
  EXPECT_EQ(push(core, 0, 2, 0), "apply 0 v3 w2c0");
  EXPECT_EQ(core.lacking(3), (std::vector<int>{1}));
  EXPECT_EQ(leave(core, 1), "answer 3 w0");
}

Core with_grace(int workers, int quorum, int keys = 1) { return Core({workers, keys, quorum, 64, true}); }

TEST(PsCore, AQuorumWaitsForMoreUntilItsGraceIsOver) {
  Core core = with_grace(4, 2, 2);
  EXPECT_EQ(push(core, 0, 3, 0), "");
  EXPECT_EQ(elapse(core, 0, 1), "");  // none has begun
  EXPECT_EQ(push(core, 0, 1, 0), "wait 0 v1");
  EXPECT_EQ(push(core, 0, 3, 1), "");  // for the next version
  EXPECT_EQ(push(core, 0, 0, 0), "");
  EXPECT_EQ(elapse(core, 1, 1) + elapse(core, 0, 0) + elapse(core, 0, 2), "");
  EXPECT_EQ(core.version(0), 0);
  EXPECT_EQ(elapse(core, 0, 1), "apply 0 v1 w3c0 w1c0 w0c0");
  EXPECT_EQ(elapse(core, 0, 1), "");
  EXPECT_EQ(push(core, 0, 2, 0), "wait 0 v2");  // with what is left of worker 3
  EXPECT_EQ(elapse(core, 0, 1), "");            // late
  EXPECT_EQ(elapse(core, 0, 2), "apply 0 v2 w3c1 w2c0");
  EXPECT_EQ(error_of([&] { elapse(core, 2, 1); }), "key: expected one of 2 keys from 0 on, got 2");
}

TEST(PsCore, AGraceEndsWhenAllHavePushed) {
  Core core = with_grace(3, 1);
  EXPECT_EQ(push(core, 0, 1, 0), "wait 0 v1");
  EXPECT_EQ(push(core, 0, 0, 0), "");
  EXPECT_EQ(push(core, 0, 2, 0), "apply 0 v1 w1c0 w0c0 w2c0");
  EXPECT_EQ(elapse(core, 0, 1), "");
  Core alone = with_grace(1, 1);
  EXPECT_EQ(push(alone, 0, 0, 0), "apply 0 v1 w0c0");
}

TEST(PsCore, WhatIsLeftAfterAVersionBeginsTheNextGrace) {
  Core core = with_grace(3, 2);
  for (int64_t clock = 0; clock < 3; ++clock) push(core, 0, 0, clock);
  EXPECT_EQ(push(core, 0, 1, 0), "wait 0 v1");
  EXPECT_EQ(push(core, 0, 1, 1), "");
  EXPECT_EQ(elapse(core, 0, 1), "apply 0 v1 w0c0 w1c0; wait 0 v2");
  EXPECT_EQ(push(core, 0, 2, 0), "apply 0 v2 w0c1 w1c1 w2c0");
  EXPECT_EQ(push(core, 0, 2, 1), "wait 0 v3");  // with worker 0
  EXPECT_EQ(push(core, 0, 2, 2), "");
  EXPECT_EQ(push(core, 0, 1, 2), "apply 0 v3 w0c2 w2c1 w1c2");
}

TEST(PsCore, AWorkerThatLeavesMayEndAGraceOrBeginIt) {
  Core core = with_grace(4, 3);
  push(core, 0, 0, 0);
  push(core, 0, 1, 0);
  EXPECT_EQ(leave(core, 3), "");  // 3 are left, and 3 are a quorum
  EXPECT_EQ(leave(core, 1), "wait 0 v1");
  EXPECT_EQ(push(core, 0, 0, 1), "");
  EXPECT_EQ(leave(core, 2), "apply 0 v1 w0c0 w1c0; apply 0 v2 w0c1");
  EXPECT_EQ(push(core, 0, 0, 2), "apply 0 v3 w0c2");

  Core last = with_grace(2, 1);
  EXPECT_EQ(push(last, 0, 0, 0), "wait 0 v1");
  push(last, 0, 0, 1);
  EXPECT_EQ(leave(last, 0), "");  // what has come counts
  EXPECT_EQ(elapse(last, 0, 1), "apply 0 v1 w0c0; wait 0 v2");
  EXPECT_EQ(leave(last, 1), "apply 0 v2 w0c1");
}

TEST(PsCore, APullMayWaitUntilTheOwnPushesAreApplied) {
  Core core({3, 2, 2});
  push(core, 0, 0, 0);
  push(core, 1, 0, 0);
  EXPECT_EQ(pull(core, 1, 0, 1, {}, {0, 1}), "answer 1 w0");
  EXPECT_EQ(applied_pull(core, 2, 0, 1, {0, 1}), "");
  EXPECT_EQ(core.lacking(2), (std::vector<int>{1, 2}));
  EXPECT_EQ(push(core, 0, 1, 0), "apply 0 v1 w0c0 w1c0");
  push(core, 0, 0, 1);  // it goes on meanwhile
  EXPECT_EQ(applied_pull(core, 3, 1, 1), "answer 3 w1");
  EXPECT_EQ(applied_pull(core, 4, 2, 1), "");
  EXPECT_EQ(core.lacking(4), (std::vector<int>{2}));  // its own push has not come
  EXPECT_EQ(push(core, 1, 2, 0), "apply 1 v1 w0c0 w2c0; answer 2 w0");
  EXPECT_EQ(push(core, 1, 1, 0), "");
  EXPECT_EQ(applied_pull(core, 5, 1, 1, {0, 1}), "");
  EXPECT_EQ(core.lacking(5), (std::vector<int>{0, 2}));
  EXPECT_EQ(leave(core, 2), "fail 4 w2");
  EXPECT_EQ(leave(core, 0), "apply 0 v2 w0c1; apply 1 v2 w1c0; answer 5 w1");
}

TEST(PsCore, AnAppliedPullWaitsForAGrace) {
  Core core = with_grace(2, 1);
  EXPECT_EQ(push(core, 0, 0, 0), "wait 0 v1");
  EXPECT_EQ(pull(core, 1, 0, 1), "answer 1 w0");
  EXPECT_EQ(applied_pull(core, 2, 0, 1), "");
  EXPECT_EQ(core.lacking(2), (std::vector<int>{1}));
  EXPECT_EQ(elapse(core, 0, 1), "apply 0 v1 w0c0; answer 2 w0");
  for (const int quorum : {all, 1}) {  // where pulls wait for it anyway
    Core other({2, 1, quorum});
    EXPECT_EQ(applied_pull(other, 1, 0, 1), "");
    EXPECT_EQ(push(other, 0, 0, 0), quorum == all ? "" : "apply 0 v1 w0c0; answer 1 w0");
    EXPECT_EQ(push(other, 0, 1, 0), quorum == all ? "apply 0 v1 w0c0 w1c0; answer 1 w0" : "apply 0 v2 w1c0");
  }
}

TEST(PsCore, CoresWithUnequalGracesOrPullsHaveUnequalStates) {
  Core waits = with_grace(3, 2), is_over = with_grace(3, 2);
  const std::vector<int64_t> before = waits.state();
  for (Core* const core : {&waits, &is_over}) {
    for (const int worker : {0, 1}) push(*core, 0, worker, 0);
  }
  EXPECT_EQ(waits.state(), is_over.state());
  EXPECT_NE(waits.state(), before);
  elapse(is_over, 0, 1);
  EXPECT_NE(waits.state(), is_over.state());
  Core plain({2, 1, 2}), applied({2, 1, 2});
  EXPECT_EQ(pull(plain, 1, 0, 1) + applied_pull(applied, 1, 0, 1), "");
  EXPECT_NE(plain.state(), applied.state());
}

TEST(PsCore, RefusesWhatIsTooFarAhead) {
  for (const int quorum : {all, 2}) {
    Core core({2, 1, quorum, 2});
    EXPECT_EQ(push(core, 0, 0, 2), "refuse 0 v0 w0c2");
    EXPECT_EQ(push(core, 0, 0, 1), "");
    EXPECT_EQ(push(core, 0, 0, 0), "");
    EXPECT_EQ(push(core, 0, 1, 0).substr(0, 10), "apply 0 v1");
    EXPECT_EQ(push(core, 0, 0, 2), "");
    EXPECT_EQ(push(core, 0, 0, 3), "refuse 0 v1 w0c3");
  }
}

TEST(PsCore, AnswersAPullOfNothing) {
  Core core({2, 0});
  EXPECT_EQ(pull(core, 1, 0, 5, 0, {}), "answer 1 w0");
}

TEST(PsCore, NamesBadArguments) {
  const auto make = [](const Core::Options& options) { return error_of([&] { Core core(options); }); };
  EXPECT_EQ(make({0}), "workers: expected at least 1, got 0");
  EXPECT_EQ(make({1, -1}), "keys: expected at least 0, got -1");
  EXPECT_EQ(make({2, 1, 3}), "quorum: expected all (0) or 1 to 2, the number of workers, got 3");
  EXPECT_EQ(make({2, 1, -1}), "quorum: expected all (0) or 1 to 2, the number of workers, got -1");
  EXPECT_EQ(make({2, 1, 1, 0}), "window: expected at least 1, got 0");
  EXPECT_EQ(make({2, 1, all, 1, true}), "grace: expected none with quorum all");
  Core core({3, 2, 2});
  const std::string key = "key: expected one of 2 keys from 0 on, got ", worker = "worker: expected one of 3 workers from 0 on, got ";
  EXPECT_EQ(error_of([&] { push(core, 2, 0, 0); }), key + "2");
  EXPECT_EQ(error_of([&] { push(core, -1, 0, 0); }), key + "-1");
  EXPECT_EQ(error_of([&] { push(core, 0, 3, 0); }), worker + "3");
  EXPECT_EQ(error_of([&] { push(core, 0, 0, -1); }), "clock: expected at least 0, got -1");
  EXPECT_EQ(error_of([&] { pull(core, 1, -1, 0); }), worker + "-1");
  EXPECT_EQ(error_of([&] { pull(core, 1, 0, -1); }), "clock: expected at least 0, got -1");
  EXPECT_EQ(error_of([&] { pull(core, 1, 0, 0, {}, {0, 2}); }), key + "2");
  EXPECT_EQ(error_of([&] { pull(core, 1, 0, 0, -1); }), "staleness: expected none or at least 0, got -1");
  EXPECT_EQ(pull(core, 1, 0, 1), "");
  EXPECT_EQ(error_of([&] { pull(core, 1, 0, 1); }), "pull: expected an id that no waiting pull has, got 1");
  EXPECT_EQ(error_of([&] { core.lacking(2); }), "pull: expected the id of a waiting pull, got 2");
  EXPECT_EQ(error_of([&] { leave(core, 3); }), worker + "3");
  EXPECT_EQ(error_of([&] { core.version(2); }), key + "2");
  EXPECT_EQ(error_of([&] { core.applied(0, 3); }), worker + "3");
}

// All orders in which the messages of 2 workers, 2 keys and 2 clocks may come, where one push comes again and one worker leaves, at any
// time. They lead to some thousand states, and equal states go on alike.
class AllOrders {
 public:
  AllOrders(int quorum, std::optional<int64_t> staleness, bool ahead, bool grace = false, bool applied = false)
      : options_{2, 2, quorum, 64, grace}, staleness_(staleness), ahead_(ahead), applied_(applied) {}

  // How many there are.
  int64_t count() { return count({Checked<Core>(options_)}); }

 private:
  // Of a worker, in each of two rounds: its pushes of both keys, and the pull that needs them.
  static constexpr int a_round = 3, a_worker = 2 * a_round;

  struct State {
    Checked<Core> core;
    unsigned to_come = (1u << 2 * a_worker) - 1;  // messages
    unsigned answered = 0;
    bool has_repeated = false;
    int lost = -1;
    std::array<int64_t, 2> graces{};  // of each key: the version whose grace has begun and was not yet told to be over; 0: none
  };

  static bool is_pull(int message) { return message % a_round == 2; }

  // Unless workers are ahead, they go on when they have read.
  bool is_sent(const State& state, int message) const {
    return ahead_ || message % a_worker < a_round || state.answered >> (message / a_worker) & 1;
  }

  void deliver(State& state, int message, int id) const {
    const int worker = message / a_worker, round = message % a_worker / a_round;
    const std::vector<int> keys = worker == 0 ? std::vector{0, 1} : std::vector{1, 0};
    note(state, is_pull(message) ? state.core.pull({id, worker, round + 1, staleness_, keys, applied_})
                                 : state.core.push(message % a_round, {worker, round, id}));
  }

  static void note(State& state, const std::vector<Action>& actions) {
    for (const Action& action : actions) {
      if (action.kind == Action::Kind::answer) state.answered |= 1u << (action.pull / a_worker);
      if (action.kind == Action::Kind::wait) state.graces[action.key] = action.version;
    }
  }

  int64_t count(const State& state) {
    std::vector<int64_t> numbers = state.core.state();
    numbers.insert(numbers.end(), {state.to_come, state.answered, state.has_repeated, state.lost, state.graces[0], state.graces[1]});
    const std::string name(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t));
    if (const auto it = counted_.find(name); it != counted_.end()) return it->second;

    int64_t orders = 0;
    const auto follow = [&](const std::string& what, const auto& event) {
      try {
        State next = state;
        event(next);
        orders += count(next);
      } catch (const Violation& error) {
        throw Violation(what + ", " + error.what());
      }
    };
    bool are_all_there = true;
    for (int message = 0; message < 2 * a_worker; ++message) {
      if (!is_sent(state, message)) continue;
      if (state.to_come >> message & 1) {
        are_all_there &= message / a_worker == state.lost;
        follow(text("message ", message), [&](State& next) {
          next.to_come &= ~(1u << message);
          deliver(next, message, message);
        });
      } else if (!state.has_repeated && !is_pull(message)) {
        follow(text("message ", message, " again"), [&](State& next) {
          next.has_repeated = true;
          deliver(next, message, 2 * a_worker + message);
        });
      }
    }
    for (int key = 0; key < 2; ++key) {
      if (state.graces[key] == 0) continue;
      are_all_there = false;
      follow(text("the grace of key ", key), [&](State& next) {
        const int64_t version = std::exchange(next.graces[key], 0);
        note(next, next.core.elapse(key, version));
      });
    }
    if (are_all_there) require(state.core.pulls().empty(), "pulls wait for ever");
    for (int worker = 0; state.lost < 0 && worker < 2; ++worker) {
      follow(text("worker ", worker, " leaves"), [&](State& next) {
        next.lost = worker;
        note(next, next.core.leave(worker));
      });
    }
    return counted_[name] = std::max<int64_t>(orders, 1);
  }

  const Core::Options options_;
  const std::optional<int64_t> staleness_;
  const bool ahead_, applied_;
  std::unordered_map<std::string, int64_t> counted_;
};

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* const value = std::getenv(name);
  return value ? std::atoll(value) : otherwise;
}

// DLTRAIN_PS_EVENTS: how many events the random schedules have. If they are many, the orders of workers that do not wait for answers are
// searched, too. DLTRAIN_PS_SEED: the first schedule, to repeat one that failed.
constexpr int64_t few_events = 100'000;
const int64_t events = from_environment("DLTRAIN_PS_EVENTS", few_events);

class EveryOrder : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(EveryOrder, KeepsTheRules) {
  const auto [quorum, staleness] = GetParam();
  const auto allowed = staleness < 0 ? std::optional<int64_t>() : staleness;
  EXPECT_EQ(AllOrders(quorum, allowed, false).count(), quorum == all ? 539'609'040 : staleness == 0 ? 545'060'160 : 1'036'240'128);
  if (events <= few_events) return;
  constexpr int64_t of_14 = 87'178'291'200;  // orders of 12 messages, a repeat and a loss: of 8 pushes, after the first; of 2 workers
  EXPECT_EQ(AllOrders(quorum, allowed, true).count(), of_14 * 8 / 2 * 2);
}

INSTANTIATE_TEST_SUITE_P(PsCore, EveryOrder, testing::Combine(testing::Values(all, 1), testing::Values(0, 1, -1)));

class EveryOrderWithGraces : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(EveryOrderWithGraces, KeepsTheRules) {
  const auto [staleness, applied] = GetParam();
  const auto allowed = staleness < 0 ? std::optional<int64_t>() : staleness;
  EXPECT_GT(AllOrders(1, allowed, false, true, applied).count(), 539'609'040);
}

INSTANTIATE_TEST_SUITE_P(PsCore, EveryOrderWithGraces, testing::Combine(testing::Values(0, 1, -1), testing::Bool()));

TEST(PsScheduler, FindsNoViolation) {
  Counts counts;
  EXPECT_EQ(search<Core>(from_environment("DLTRAIN_PS_SEED", 1), events, counts), "");
  const auto& [of_core, applied, discarded, refused, answered, failed, waited] = counts;
  EXPECT_GE(of_core, events);
  for (const int64_t count : {applied, discarded, answered}) EXPECT_GT(count, of_core / 10);
  for (const int64_t count : {refused, failed, waited}) EXPECT_GT(count, of_core / 1000);
}

// Cores with a defect each.
struct AppliesRepeats : Core {
  using Core::Core;
  void push(int key, Contribution contribution, std::vector<Action>& actions) {
    contribution.clock = std::max(contribution.clock, applied(key, contribution.worker));
    Core::push(key, contribution, actions);
  }
};
struct IgnoresStaleness : Core {
  using Core::Core;
  void pull(Pull pull, std::vector<Action>& actions) {
    pull.staleness.reset();
    Core::pull(std::move(pull), actions);
  }
};
struct ReversesTheOrder : Core {
  using Core::Core;
  void push(int key, const Contribution& contribution, std::vector<Action>& actions) {
    Core::push(key, contribution, actions);
    for (Action& action : actions) std::reverse(action.contributions.begin(), action.contributions.end());
  }
};
struct ForgetsAPull : Core {
  using Core::Core;
  void push(int key, const Contribution& contribution, std::vector<Action>& actions) {
    Core::push(key, contribution, actions);
    if (actions.size() > 2 && actions.back().kind == Action::Kind::answer) actions.pop_back();
  }
};
struct CountsTheDead : Core {
  using Core::Core;
  void leave(int worker, std::vector<Action>& actions) {
    if (worker > 0) Core::leave(worker, actions);
  }
};

struct NeverEndsAGrace : Core {
  using Core::Core;
  void elapse(int, int64_t, std::vector<Action>&) {}
};
struct EndsTheNextGrace : Core {
  using Core::Core;
  void elapse(int key, int64_t, std::vector<Action>& actions) { Core::elapse(key, version(key) + 1, actions); }
};
struct AnswersWhatIsNotApplied : Core {
  using Core::Core;
  void pull(Pull pull, std::vector<Action>& actions) {
    pull.applied = false;
    Core::pull(std::move(pull), actions);
  }
};

template <class Broken>
class PsSchedulerOf : public testing::Test {};
using Defects = testing::Types<AppliesRepeats, IgnoresStaleness, ReversesTheOrder, ForgetsAPull, CountsTheDead, NeverEndsAGrace,
                               EndsTheNextGrace, AnswersWhatIsNotApplied>;
TYPED_TEST_SUITE(PsSchedulerOf, Defects);

TYPED_TEST(PsSchedulerOf, FindsTheDefectAndShrinksTheSchedule) {
  Counts counts;
  const std::string found = search<TypeParam>(1, few_events, counts);
  EXPECT_EQ(found.substr(0, 5), "seed ") << found;
  EXPECT_LT(std::count(found.begin(), found.end(), '\n'), 40) << found;
}

}  // namespace
}  // namespace dltrain::ps
