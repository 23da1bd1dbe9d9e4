#include "comm/fault/failure_detector.h"

#include <gtest/gtest.h>

#include <latch>

#include "comm/fault/in_process_control_channel.h"
#include "core/check.h"
#include "tests/comm/ranks.h"

namespace dltrain::comm {
namespace {

using Cause = Diagnosis::Cause;
using Ms = std::chrono::milliseconds;
const AdaptiveTimeout answer_timeout(Ms(500));

Known waits(int64_t begun, const std::vector<int>& peers) { return {false, RankState::of(begun, {peers, 0})}; }
Known is_idle(int64_t begun) { return waits(begun, {}); }
const Known has_left{true, {}}, is_silent{};

// Checks the diagnosis of rank 0, which waits for rank 1 in call 7.
void expect_diagnosis(const std::map<int, Known>& others, Cause cause, int culprit, const std::vector<int>& waited_for = {1}) {
  const Diagnosis diagnosis = judge(0, 7, {waited_for, 2}, others);
  EXPECT_EQ(diagnosis.cause, cause) << describe(diagnosis);
  EXPECT_EQ(diagnosis.culprit, culprit) << describe(diagnosis);
}

TEST(Diagnosis, NamesTheEndOfTheChainOfWaits) {
  expect_diagnosis({{1, has_left}, {2, is_silent}, {3, is_idle(6)}}, Cause::left, 1);
  expect_diagnosis({{1, waits(7, {2})}, {2, waits(7, {3})}, {3, is_silent}}, Cause::silent, 3);
  expect_diagnosis({{1, waits(7, {3})}, {2, is_idle(6)}, {3, has_left}}, Cause::left, 3);
  expect_diagnosis({{1, waits(7, {2})}, {2, is_idle(6)}, {3, is_idle(7)}}, Cause::late, 2);
  expect_diagnosis({{1, waits(6, {3})}, {2, is_idle(6)}, {3, is_idle(5)}}, Cause::late, 3);  // it has not even made that call
}

TEST(Diagnosis, PrefersTheMostCertainOfSeveralEnds) {
  expect_diagnosis({{1, waits(7, {2, 3})}, {2, is_idle(6)}, {3, is_silent}}, Cause::silent, 3);
  expect_diagnosis({{1, is_silent}, {2, is_idle(6)}, {3, has_left}}, Cause::left, 3, {1, 2, 3});
}

TEST(Diagnosis, NamesOnlyDeadRanksOutsideOfTheChain) {
  expect_diagnosis({{1, waits(7, {0})}, {2, is_silent}, {3, is_idle(6)}}, Cause::silent, 2);
  expect_diagnosis({{1, waits(7, {0})}, {2, waits(7, {1})}, {3, is_idle(6)}}, Cause::none, 1);
  expect_diagnosis({{1, is_idle(7)}, {2, is_idle(8)}}, Cause::none, 1);
}

TEST(Diagnosis, FollowsARankThatWaitsForMoreThanItCanName) {
  std::map<int, Known> others;
  std::vector<int> all;
  for (int rank = 1; rank < 40; ++rank) {
    all.push_back(rank);
    others[rank] = is_idle(7);
  }
  others[1] = waits(7, all);
  others[39] = is_idle(6);
  expect_diagnosis(others, Cause::late, 39);
}

TEST(Diagnosis, IsDescribedInOneSentence) {
  const auto said = [](Cause cause, int culprit) { return describe({cause, culprit, 0, 2, 7}); };
  EXPECT_EQ(said(Cause::left, 3), "the culprit is rank 3: it has left (found by rank 0 in round 2 of call 7)");
  EXPECT_EQ(said(Cause::silent, 3), "the culprit is rank 3: it does not answer (found by rank 0 in round 2 of call 7)");
  EXPECT_EQ(said(Cause::late, 3), "the culprit is rank 3: it is alive, but has not made call 7 (found by rank 0 in round 2 of call 7)");
  EXPECT_EQ(said(Cause::none, 3),
            "all ranks answer and have made the call, so the connection of the ranks 0 and 3 is broken or too slow "
            "(found by rank 0 in round 2 of call 7)");
  EXPECT_EQ(said(Cause::none, -1),
            "all ranks answer and have made the call, so a connection of rank 0 is broken or too slow "
            "(found by rank 0 in round 2 of call 7)");
  EXPECT_EQ(said(Cause::disagreement, 3), "rank 0 does not agree with rank 3 on the call (found by rank 0 in round 2 of call 7)");
}

// Ranks that each wait for the next one in call 1, with a failure detector each; the name of a rank is ten times its number. The last one
// has none: its end of the channel is open, but nothing reads it.
class Chain {
 public:
  explicit Chain(int world_size) : channels_(in_process_control_channels(world_size)), found_(world_size) {
    std::vector<int> names;
    for (int rank = 0; rank < world_size; ++rank) names.push_back(10 * rank);
    for (int rank = 0; rank + 1 < world_size; ++rank) {
      const Waiting waiting{{names[rank + 1]}, rank};
      detectors_.push_back(std::make_unique<FailureDetector>(
          std::move(channels_[rank]), names,
          FailureDetector::Calls{[waiting] { return waiting; }, [this, rank](const std::string& finding) { give_up(rank, finding); }},
          answer_timeout));
      detectors_.back()->begin();
    }
    last_ = std::move(channels_.back());
  }
  ~Chain() {
    for (auto& failure_detector : detectors_) failure_detector->close();
  }

  FailureDetector& operator[](int rank) { return *detectors_[rank]; }
  ControlChannel& last() { return *last_; }
  std::unique_ptr<ControlChannel> take_last() { return std::move(last_); }
  std::string explain(int rank) { return detectors_[rank]->explain({{10 * (rank + 1)}, rank}); }

  // Returns why a rank has given up its calls. Closes its detector first, which may still be about to act on a diagnosis.
  std::string found(int rank) {
    detectors_[rank]->close();
    std::lock_guard lock(mutex_);
    return found_[rank];
  }

 private:
  void give_up(int rank, const std::string& finding) {
    std::lock_guard lock(mutex_);
    EXPECT_EQ(found_[rank], "") << "twice";
    found_[rank] = finding;
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<ControlChannel>> channels_;
  std::vector<std::string> found_;
  std::vector<std::unique_ptr<FailureDetector>> detectors_;
  std::unique_ptr<ControlChannel> last_;
};

TEST(FailureDetector, NamesARankThatDoesNotAnswerOnAllOthers) {
  Chain ranks(4);
  const std::string finding = ranks.explain(1);
  EXPECT_EQ(finding, "the culprit is rank 30: it does not answer (found by rank 10 in round 1 of call 1)");
  EXPECT_EQ(ranks.explain(0), finding);
  for (int rank : {0, 1, 2}) EXPECT_EQ(ranks.found(rank), finding) << rank;
}

TEST(FailureDetector, DetectsAtOnceThatARankHasLeft) {
  Chain ranks(4);
  ranks.last().close();
  const auto start = Clock::now();
  EXPECT_EQ(ranks.explain(0), "the culprit is rank 30: it has left (found by rank 0 in round 0 of call 1)");
  EXPECT_LT(Clock::now() - start, Ms(450));
}

TEST(FailureDetector, NamesALateRankAlsoOnThatRank) {
  Chain ranks(3);
  std::string told;
  FailureDetector late(ranks.take_last(), {0, 10, 20}, {[] { return Waiting(); }, [&](const std::string& finding) { told = finding; }},
                       answer_timeout);
  const std::string finding = ranks.explain(0);
  late.close();
  EXPECT_EQ(finding, "the culprit is rank 20: it is alive, but has not made call 1 (found by rank 0 in round 0 of call 1)");
  EXPECT_EQ(told, finding);
}

TEST(FailureDetector, NamesNoCulpritIfAllRanksAnswer) {
  Chain ranks(3);
  FailureDetector last(ranks.take_last(), {0, 10, 20}, {[] { return Waiting{{0}, 0}; }, [](const std::string&) {}}, answer_timeout);
  last.begin();
  EXPECT_EQ(ranks.explain(0),
            "all ranks answer and have made the call, so the connection of the ranks 0 and 10 is broken or too slow "
            "(found by rank 0 in round 0 of call 1)");
}

TEST(FailureDetector, ConcurrentFailuresNameTheSameCulprit) {
  for (const bool left : {false, true}) {
    constexpr int others = 7;
    Chain ranks(others + 1);
    if (left) ranks.last().close();
    std::vector<std::string> findings(others);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < others; ++rank) threads.emplace_back([&, rank] { findings[rank] = ranks.explain(rank); });
    for (auto& thread : threads) thread.join();
    for (const std::string& finding : findings) {
      EXPECT_EQ(finding.find(left ? "the culprit is rank 70: it has left (" : "the culprit is rank 70: it does not answer ("), 0u)
          << finding;
    }
  }
}

// Each rank closes its detector after the diagnosis, and must not be named as the culprit for that.
TEST(FailureDetector, ARankThatEndsAfterADiagnosisIsNotTheCulprit) {
  for (int i = 0; i < 50; ++i) {
    Chain ranks(5);
    ranks.last().close();
    std::vector<std::string> findings(4);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 4; ++rank) {
      threads.emplace_back([&, rank] {
        findings[rank] = ranks.explain(rank);
        ranks[rank].close();
      });
    }
    for (auto& thread : threads) thread.join();
    for (const std::string& finding : findings) EXPECT_EQ(finding.find("the culprit is rank 40: it has left"), 0u) << finding;
  }
}

TEST(AdaptiveTimeout, GrowsWithTheTimeOfAnswers) {
  AdaptiveTimeout near(Ms(500), Ms(1)), far(Ms(500), Ms(100));
  EXPECT_NEAR(near.get().count(), 0.5, 1e-6);
  EXPECT_NEAR(far.get().count(), 8 * 0.3, 1e-6);
  near.measure(Ms(403));  // 50 ms more of the mean, 100 ms of deviation
  EXPECT_NEAR(near.get().count(), 8 * (0.053 + 0.4), 1e-6);
  for (int i = 0; i < 100; ++i) far.measure(Ms(100));
  EXPECT_NEAR(far.get().count(), 8 * 0.1, 1e-3);
}

// A rank whose answers take long.
TEST(FailureDetector, ARankKnownToBeSlowIsWaitedFor) {
  for (const bool known : {false, true}) {
    auto channels = in_process_control_channels(2);
    ControlChannel& other = *channels[1];
    std::thread slow([&] {
      while (const auto received = other.receive()) {
        std::this_thread::sleep_for(Ms(200));
        if (received->notice.kind == ControlMessage::Kind::question)
          other.send(0, {ControlMessage::Kind::answer, {}, {}, received->notice.asked});
      }
    });
    const FailureDetector::Calls calls{[] { return Waiting(); }, [](const std::string&) {}};
    FailureDetector failure_detector(std::move(channels[0]), {}, calls, AdaptiveTimeout(Ms(100), known ? Ms(70) : Ms(0)));
    failure_detector.begin();
    const std::string finding = failure_detector.explain({{1}, 0});
    EXPECT_NE(finding.find(known ? "it is alive, but has not made call 1" : "it does not answer"), std::string::npos) << finding;
    other.close();
    slow.join();
  }
}

TEST(FailureDetector, ClosingEndsAnInquiry) {
  Chain ranks(2);  // the other rank never answers
  std::thread closing([&] {
    std::this_thread::sleep_for(Ms(50));
    ranks[0].close();
  });
  const auto start = Clock::now();
  EXPECT_EQ(ranks.explain(0), "");
  EXPECT_LT(Clock::now() - start, Ms(450));
  closing.join();
  EXPECT_EQ(ranks.explain(0), "");
  EXPECT_EQ(ranks.found(0), "");
}

TEST(FailureDetector, ADisagreementIsExplainedWithoutAnAbort) {
  Chain ranks(3);
  ranks.last().close();
  EXPECT_NE(ranks[0].declare(Cause::disagreement, {{10}, 0}), "");
  EXPECT_EQ(ranks.explain(1), "rank 0 does not agree with rank 10 on the call (found by rank 0 in round 0 of call 1)");
  EXPECT_EQ(ranks.found(1), "");
}

TEST(FailureDetector, ARankThatFailsByItselfIsTheCulprit) {
  Chain ranks(4);
  ranks.last().close();
  const std::string finding = ranks[1].declare(Cause::failure, {{20}, 3});
  EXPECT_EQ(finding, "the culprit is rank 10: its part of the call has failed (found by rank 10 in round 3 of call 1)");
  for (int rank : {0, 1, 2}) EXPECT_EQ(ranks.found(rank), finding) << rank;
}

// Returns the errors of all-reduces on ranks with failure detectors; the last rank never makes its call, and has no error.
std::vector<std::string> errors_without_the_last(int world_size, const std::string& algorithm, bool answers) {
  auto channels = in_process_control_channels(world_size);
  std::vector<std::string> errors(world_size);
  std::latch over(world_size);
  on_ranks(world_size, [&](Executor& executor, Runner&) {
    const int rank = executor.rank();
    std::shared_ptr<FailureDetector> failure_detector;
    if (rank + 1 < world_size || answers) {
      failure_detector = std::make_shared<FailureDetector>(
          std::move(channels[rank]), std::vector<int>(),
          FailureDetector::Calls{[&] { return executor.waiting(); }, [&](const std::string& finding) { executor.give_up(finding); }},
          answer_timeout);
      executor.set_failure_detector(failure_detector);
    }
    if (rank + 1 < world_size) {
      failure_detector->begin();
      std::vector<float> values(1000, 1.0f);
      CallOptions call;
      call.algorithm = algorithm;
      call.segments = 3;
      call.timeout = Ms(rank == 0 ? 200 : 20000);  // ranks with longer deadlines receive the diagnosis
      try {
        executor.run({}, {values.data()}, std::ssize(values), call);
      } catch (const CollectiveError& error) {
        errors[rank] = error.what();
      }
    }
    over.arrive_and_wait();
    if (failure_detector) failure_detector->close();
  });
  return errors;
}

TEST(FailureDetector, ExplainsWhyAnAllReduceFails) {
  for (const std::string& algorithm : algorithms()) {
    for (const bool answers : {false, true}) {
      const auto errors = errors_without_the_last(4, algorithm, answers);
      const std::string culprit = text("; the culprit is rank 3: it ", answers ? "is alive, but has not made call 1" : "does not answer",
                                       " (found by rank 0 in round ");
      for (int rank : {0, 1, 2}) {
        EXPECT_EQ(errors[rank].find(text("all_reduce with ", algorithm, " on rank ", rank, " in a group of 4: waiting for rank ")), 0u)
            << errors[rank];
        EXPECT_NE(errors[rank].find(culprit), std::string::npos) << errors[rank];
      }
    }
  }
}

}  // namespace
}  // namespace dltrain::comm
