#include <gtest/gtest.h>

#include <thread>

#include "comm/executor.h"
#include "comm/in_process.h"

namespace dltrain::comm {
namespace {

// Runs body(executor) on world_size ranks, each a thread.
template <class Body>
void on_ranks(int world_size, Body body) {
  std::vector<std::thread> threads;
  for (auto& end : in_process_group(world_size)) {
    threads.emplace_back([&body, end = std::move(end)]() mutable {
      Executor executor(std::move(end));
      body(executor);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Small integers: their sums are exact in any order.
float given(int rank, int64_t i) { return static_cast<float>((i * 7 + rank * 13) % 31 - 15); }

void expect_sum(const std::string& algorithm, int world_size, int64_t numel, int segments) {
  on_ranks(world_size, [&](Executor& executor) {
    std::vector<float> values(numel);
    for (int64_t i = 0; i < numel; ++i) values[i] = given(executor.rank(), i);
    AllReduce call;
    call.algorithm = algorithm;
    call.segments = segments;
    executor.all_reduce({}, values.data(), numel, call);
    for (int64_t i = 0; i < numel; ++i) {
      float sum = 0;
      for (int rank = 0; rank < world_size; ++rank) sum += given(rank, i);
      ASSERT_EQ(values[i], sum) << algorithm << " p=" << world_size << " n=" << numel << " segments=" << segments << " i=" << i;
    }
  });
}

TEST(Executor, SumsAnyLengthOnAnyWorld) {
  for (const std::string& algorithm : algorithms()) {
    for (int world_size : {1, 2, 3, 4, 5, 8, 13}) {
      for (int64_t numel : {0, 1, 15, 17, 1000, 10007}) {
        for (int segments : {1, 3}) expect_sum(algorithm, world_size, numel, segments);
      }
    }
  }
}

TEST(Executor, AveragesAndHoldsTheSameBitsOnAllRanks) {
  for (const std::string& algorithm : algorithms()) {
    constexpr int world_size = 3;
    constexpr int64_t numel = 5000;
    std::vector<std::vector<float>> results(world_size);
    on_ranks(world_size, [&](Executor& executor) {
      auto& values = results[executor.rank()];
      for (int64_t i = 0; i < numel; ++i) values.push_back(1.0f / static_cast<float>(i + executor.rank() + 1));
      AllReduce call;
      call.algorithm = algorithm;
      call.average = true;
      executor.all_reduce({}, values.data(), numel, call);
    });
    EXPECT_EQ(results[0], results[1]);
    EXPECT_EQ(results[0], results[2]);
    EXPECT_NEAR(results[0][0], (1.0 + 1.0 / 2 + 1.0 / 3) / 3, 1e-6);
  }
}

TEST(Executor, NamesTheRankItWaitsFor) {
  on_ranks(3, [](Executor& executor) {
    if (executor.rank() == 1) return;
    std::vector<float> values(100, 1.0f);
    AllReduce call;
    call.algorithm = "ring";
    call.timeout = std::chrono::milliseconds(50);
    try {
      executor.all_reduce({}, values.data(), 100, call);
      FAIL() << "did not fail";
    } catch (const AllReduceError& error) {
      if (executor.rank() == 2) {
        EXPECT_NE(std::string(error.what()).find("all_reduce with ring on rank 2 in a group of 3: waiting for rank 1 in round 0 of 4"),
                  std::string::npos)
            << error.what();
      }
    }
    EXPECT_THROW(executor.all_reduce({}, values.data(), 100, call), AllReduceError);
  });
}

TEST(Executor, AbortEndsAWait) {
  on_ranks(2, [](Executor& executor) {
    if (executor.rank() == 1) return;
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      executor.abort("closed by the test");
    });
    std::vector<float> values(100, 1.0f);
    try {
      executor.all_reduce({}, values.data(), 100, {});
      ADD_FAILURE() << "did not fail";
    } catch (const AllReduceError& error) {
      EXPECT_STREQ(error.what(), "closed by the test");
    }
    other.join();
  });
}

TEST(Program, ReusesItsInbox) {
  const Program program = lower(make_plan("ring", 0, 8), find_codec("raw"), 8 * 1600, 1);
  EXPECT_EQ(program.inbox, 2 * 1600);
  EXPECT_EQ(program.sent, 2 * 7 * 1600);
}

}  // namespace
}  // namespace dltrain::comm
