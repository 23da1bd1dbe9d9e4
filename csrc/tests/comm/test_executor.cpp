#include "comm/run/executor.h"

#include <latch>
#include <thread>

#include "tests/comm/ranks.h"
#include "tests/contexts.h"

namespace dltrain::comm {
namespace {

// Small integers: their sums are exact in any order.
float given(int rank, int64_t i) { return static_cast<float>((i * 7 + rank * 13) % 31 - 15); }

void expect_sum(const ExecutionContext& context, const std::string& algorithm, int world_size, int64_t numel, int segments) {
  on_ranks(
      world_size,
      [&](Executor& executor, Runner& runner) {
        std::vector<float> values(numel);
        for (int64_t i = 0; i < numel; ++i) values[i] = given(executor.rank(), i);
        CallOptions call;
        call.algorithm = algorithm;
        call.segments = segments;
        const Array<float> array(context, values);
        runner.run(executor, {array.data()}, numel, call);
        values = array.values();
        for (int64_t i = 0; i < numel; ++i) {
          float sum = 0;
          for (int rank = 0; rank < world_size; ++rank) sum += given(rank, i);
          ASSERT_EQ(values[i], sum) << algorithm << " p=" << world_size << " n=" << numel << " segments=" << segments << " i=" << i;
        }
      },
      context);
}

class ExecutorOn : public OnEveryContext {};
DLT_ON_EVERY_CONTEXT(ExecutorOn);

TEST_P(ExecutorOn, SumsAnyLengthOnAnyWorld) {
  for (const std::string& algorithm : algorithms()) {
    for (const int world_size : {1, 2, 3, 4, 5, 8, 13}) {
      for (const int64_t numel : {0, 1, 15, 17, 1000, 10007}) {
        for (const int segments : {1, 3}) expect_sum(context(), algorithm, world_size, numel, segments);
      }
    }
  }
}

TEST(Executor, AveragesAndHoldsTheSameBitsOnAllRanks) {
  for (const std::string& algorithm : algorithms()) {
    constexpr int world_size = 3;
    constexpr int64_t numel = 5000;
    std::vector<std::vector<float>> results(world_size);
    on_ranks(world_size, [&](Executor& executor, Runner&) {
      auto& values = results[executor.rank()];
      for (int64_t i = 0; i < numel; ++i) values.push_back(1.0f / static_cast<float>(i + executor.rank() + 1));
      CallOptions call;
      call.algorithm = algorithm;
      call.average = true;
      executor.run({}, {values.data()}, numel, call);
    });
    EXPECT_EQ(results[0], results[1]);
    EXPECT_EQ(results[0], results[2]);
    EXPECT_NEAR(results[0][0], (1.0 + 1.0 / 2 + 1.0 / 3) / 3, 1e-6);
  }
}

// Returns the errors of all ranks, where rank 0 makes another call than the others.
std::vector<std::string> disagree(const CallOptions& first, int64_t numel, const CallOptions& others, int64_t their_numel) {
  std::vector<std::string> errors(3);
  on_ranks(3, [&](Executor& executor, Runner&) {
    std::vector<float> values(std::max(numel, their_numel), 1.0f);
    CallOptions agreed;
    agreed.timeout = std::chrono::seconds(20);
    executor.run({}, {values.data()}, numel, agreed);
    CallOptions call = executor.rank() == 0 ? first : others;
    call.timeout = std::chrono::seconds(20);
    try {
      executor.run({}, {values.data()}, executor.rank() == 0 ? numel : their_numel, call);
    } catch (const CollectiveError& error) {
      errors[executor.rank()] = error.what();
    }
  });
  return errors;
}

TEST(Executor, RanksThatDisagreeFail) {
  CallOptions ring, int8, average;
  ring.algorithm = int8.algorithm = average.algorithm = "ring";
  int8.codec = "int8";
  average.average = true;
  const std::string plain = "call 2: all_reduce in raw by ring over 70000 elements in 1 segment, summed";
  const auto expect = [&](const CallOptions& other, int64_t numel, const std::string& theirs) {
    const auto errors = disagree(ring, 70000, other, numel);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_NE(errors[rank].find("all_reduce with ring on rank " + std::to_string(rank)), std::string::npos) << errors[rank];
    }
    for (int rank : {0, 1}) {  // both errors describe both calls
      EXPECT_NE(errors[rank].find("it is in " + (rank ? plain : theirs)), std::string::npos) << errors[rank];
      EXPECT_NE(errors[rank].find("this rank is in " + (rank ? theirs : plain)), std::string::npos) << errors[rank];
    }
  };
  expect(ring, 69999, "call 2: all_reduce in raw by ring over 69999 elements in 1 segment, summed");
  expect(ring, 10, "call 2: all_reduce in raw by ring over 10 elements in 1 segment, summed");
  expect(int8, 70000, "call 2: all_reduce in int8 by ring over 70000 elements in 1 segment, summed");
  expect(average, 70000, "call 2: all_reduce in raw by ring over 70000 elements in 1 segment, averaged");
}

TEST(Executor, FailsWhenAPeerHasClosed) {
  on_ranks(2, [](Executor& executor, Runner&) {
    std::vector<float> values(100, 1.0f);
    executor.run({}, {values.data()}, 100, {});
    if (executor.rank() == 1) return;
    try {
      executor.run({}, {values.data()}, 100, {});
      ADD_FAILURE() << "did not fail";
    } catch (const CollectiveError& error) {
      EXPECT_NE(
          std::string(error.what()).find("it has closed its end; its latest is call 1: all_reduce in raw by oneshot over 100 elements"),
          std::string::npos)
          << error.what();
    }
  });
}

// Nothing is sent, but ranks that do reduce elements fail.
TEST(Executor, HandshakesWithoutElements) {
  on_ranks(3, [](Executor& executor, Runner&) {
    std::vector<float> values(executor.rank() == 2 ? 5 : 0);
    CallOptions call;
    call.timeout = std::chrono::seconds(20);
    executor.run({}, {values.data()}, 0, call);
    EXPECT_EQ(executor.wire_bytes(), 0);
    if (executor.rank() == 1) return;  // this neighbour of rank 0 has the same call
    EXPECT_THROW(executor.run({}, {values.data()}, std::ssize(values), call), CollectiveError);
  });
}

TEST(Executor, SavesProgramsForEachType) {
  on_ranks(2, [](Executor& executor, Runner&) {
    constexpr int64_t numel = 100;
    CallOptions call;
    call.algorithm = "ring";
    std::vector<float> values(numel, 1.0f);
    std::vector<uint16_t> halves(numel, narrow<Half>(1.0f).bits);
    for (int i = 0; i < 2; ++i) {
      executor.run({}, {values.data()}, numel, call);
      executor.run({}, {halves.data(), Dtype::fp16}, numel, call);
    }
    EXPECT_EQ(values, std::vector<float>(numel, 4.0f));
    EXPECT_EQ(halves, std::vector<uint16_t>(numel, narrow<Half>(4.0f).bits));
  });
}

TEST(Executor, SendsMessagesWithinFramesIfTheyFit) {
  for (const int64_t numel : {16383, 16384, 16385}) {  // 64 KiB, one element less, and one more
    for (const std::string& algorithm : algorithms()) expect_sum({}, algorithm, 2, numel, 1);
    expect_sum({}, "ring", 3, 3 * numel, 1);
  }
}

TEST(Executor, CutsNoMoreSegmentsThanThereAreBlocks) {
  const Program program =
      lower(make_plan(Collective::all_reduce, "ring", 0, 3), cut_evenly(1000, find_codec("int8"), 1'000'000), Result::values);
  EXPECT_EQ(program.segments, 4);
  EXPECT_EQ(std::ssize(program.ticks), program.rounds + program.segments);
}

TEST(Executor, NamesTheRankItWaitsFor) {
  std::latch over(2);
  on_ranks(3, [&](Executor& executor, Runner&) {
    if (executor.rank() == 1) return over.wait();
    std::vector<float> values(100, 1.0f);
    CallOptions call;
    call.algorithm = "ring";
    call.timeout = std::chrono::milliseconds(50);
    try {
      executor.run({}, {values.data()}, 100, call);
      FAIL() << "did not fail";
    } catch (const CollectiveError& error) {
      if (executor.rank() == 2) {
        EXPECT_NE(std::string(error.what()).find("all_reduce with ring on rank 2 in a group of 3: waiting for rank 1 in round 0 of 4"),
                  std::string::npos)
            << error.what();
      }
    }
    EXPECT_THROW(executor.run({}, {values.data()}, 100, call), CollectiveError);
    over.count_down();
  });
}

TEST(Executor, AbortEndsAWait) {
  std::latch over(1);
  on_ranks(2, [&](Executor& executor, Runner&) {
    if (executor.rank() == 1) return over.wait();
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      executor.abort("closed by the test");
    });
    std::vector<float> values(100, 1.0f);
    try {
      executor.run({}, {values.data()}, 100, {});
      ADD_FAILURE() << "did not fail";
    } catch (const CollectiveError& error) {
      EXPECT_STREQ(error.what(), "closed by the test");
    }
    other.join();
    over.count_down();
  });
}

TEST(Program, ReusesItsReceiveBuffer) {
  const Program program =
      lower(make_plan(Collective::all_reduce, "ring", 0, 8), cut_evenly(8 * 1600, find_codec("raw"), 1), Result::values_in_place);
  EXPECT_EQ(program.receive_buffer, 2 * 1600 * 4);
  EXPECT_EQ(program.sent, 2 * 7 * 1600 * 4);
  EXPECT_EQ(program.slots, 0);
}

}  // namespace
}  // namespace dltrain::comm
