// Tests calls of a communicator with one level and with two, on ranks that are threads.

#include "comm/run/communicator.h"

#include <functional>
#include <thread>

#include "comm/fault/in_process_control_channel.h"
#include "tests/comm/ranks.h"
#include "tests/contexts.h"

namespace dltrain::comm {
namespace {

using Ms = std::chrono::milliseconds;

std::shared_ptr<Executor> over(std::unique_ptr<Transport> end, std::vector<int> ranks) {
  return std::make_shared<Executor>(std::make_unique<FramedTransport>(std::move(end)), std::move(ranks));
}

// Runs body(communicator, rank) on four ranks: on two hosts of two or, with one level, all together.
void on_four_ranks(bool in_two_levels, const std::function<void(Communicator&, int)>& body) {
  auto all = in_process_group(4);
  auto control = in_process_control_channels(4);
  std::vector<std::vector<std::unique_ptr<Transport>>> hosts, shards;
  for (int i = 0; i < 2; ++i) {
    hosts.push_back(in_process_group(2));
    shards.push_back(in_process_group(2));
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    const int host = rank / 2, local = rank % 2;
    std::shared_ptr<Executor> across, inside;
    if (in_two_levels) {
      across = over(std::move(shards[local][host]), {local, local + 2});
      inside = over(std::move(hosts[host][local]), {2 * host, 2 * host + 1});
    } else {
      across = over(std::move(all[rank]), {});
    }
    threads.emplace_back([&, rank, across, inside, channel = std::move(control[rank])]() mutable {
      const Hosts of_all = in_two_levels ? Hosts{2, 2, 4} : Hosts{1, 1, 4};
      Communicator communicator(across, inside, of_all, std::move(channel), {0, 1, 2, 3}, AdaptiveTimeout(Ms(500)));
      body(communicator, rank);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Sums up the values of all ranks.
void add_up(Communicator& communicator, std::vector<float>& values, Ms timeout = std::chrono::minutes(1)) {
  CallOptions call;
  call.algorithm = "ring";
  call.timeout = timeout;
  communicator.attempt([&] { communicator.run({}, {values.data()}, std::ssize(values), call); });
}

TEST(Communicator, RunsCallsAndCountsThem) {
  for (const bool in_two_levels : {false, true}) {
    on_four_ranks(in_two_levels, [&](Communicator& communicator, int rank) {
      for (int call = 0; call < 2; ++call) {
        std::vector<float> values(1000, static_cast<float>(rank + 1));
        add_up(communicator, values);
        EXPECT_EQ(values, std::vector<float>(1000, 10.0f));
      }
      EXPECT_EQ(communicator.calls(), 2);
      EXPECT_GT(communicator.wire_bytes(), 0);
      EXPECT_EQ(communicator.inside_bytes() > 0, in_two_levels);
      EXPECT_EQ(communicator.failure(), "");
    });
  }
}

// Rank 3 never makes the call, but answers: all others fail at the shortest deadline, name it, and fail at once from then on.
TEST(Communicator, FailsOnAllLevelsAndNamesTheCulprit) {
  for (const bool in_two_levels : {false, true}) {
    std::atomic<int> failed = 0;
    on_four_ranks(in_two_levels, [&](Communicator& communicator, int rank) {
      if (rank == 3) {
        while (failed < 3) std::this_thread::sleep_for(Ms(1));
        EXPECT_NE(communicator.failure().find("the culprit is rank 3"), std::string::npos) << communicator.failure();
        return;
      }
      std::vector<float> values(1000);
      std::string said;
      try {
        add_up(communicator, values, Ms(100));
      } catch (const CollectiveError& error) {
        said = error.what();
      }
      EXPECT_NE(said.find("the culprit is rank 3"), std::string::npos) << "rank " << rank << ": " << said;
      EXPECT_EQ(communicator.calls(), 0);
      EXPECT_FALSE(communicator.failure().empty());
      EXPECT_THROW(add_up(communicator, values), CollectiveError);
      ++failed;
    });
  }
}

// An error between the messages of a call would leave the other ranks waiting, so it ends both levels.
TEST(Communicator, EndsBothLevelsIfTheWorkOfACallFails) {
  on_four_ranks(true, [&](Communicator& communicator, int) {
    EXPECT_THROW(communicator.attempt([] { throw CollectiveError("broken"); }), CollectiveError);
    EXPECT_EQ(communicator.failure(), "broken");
    EXPECT_EQ(communicator.inside()->failure(), "broken");
    EXPECT_EQ(communicator.calls(), 0);
  });
}

TEST(Communicator, FailsLaterCallsAfterAFailure) {
  on_four_ranks(true, [&](Communicator& communicator, int) {
    communicator.end("it was closed");
    communicator.close();
    std::vector<float> values(10);
    try {
      add_up(communicator, values);
      FAIL() << "not refused";
    } catch (const CollectiveError& error) {
      EXPECT_STREQ(error.what(), "it was closed");
    }
  });
}

TEST(Communicator, OnlyAllReducesInTwoLevels) {
  on_four_ranks(true, [&](Communicator& communicator, int) {
    std::vector<float> values(10);
    CallOptions call;
    call.collective = Collective::broadcast;
    EXPECT_THROW(communicator.run({}, {values.data()}, 10, call), std::invalid_argument);
  });
}

TEST(Communicator, NeedsNoChannelForOneRank) {
  Communicator communicator(over(std::move(in_process_group(1)[0]), {0}), nullptr, {1, 1, 1}, nullptr, {0}, AdaptiveTimeout(Ms(500)));
  std::vector<float> values(10, 2.0f);
  add_up(communicator, values);
  EXPECT_EQ(values, std::vector<float>(10, 2.0f));
}

}  // namespace
}  // namespace dltrain::comm
