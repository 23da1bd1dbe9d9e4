// Tests the executor over the fake NCCL: it gives the results of the in-process transport, in few launches, and within its deadlines.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <latch>
#include <random>

#include "comm/fault/in_process_control_channel.h"
#include "comm/plan/plan.h"
#include "kernels/codec.h"
#include "tests/comm/nccl_ranks.h"

namespace dltrain::comm::nccl {
namespace {

using Values = std::vector<float>;

Values given(int rank, int64_t numel) {
  std::mt19937 random(1 + rank);
  std::normal_distribution<float> normal;
  Values values(numel);
  for (float& value : values) value = normal(random);
  return values;
}

struct Case {
  CallOptions call;
  int64_t numel;
};

// An emulated device is slow, so it only runs the limiting cases.
std::vector<Case> cases(int world_size, bool all) {
  std::vector<Case> out;
  for (const Codec& codec : codecs()) {
    for (const std::string& algorithm : algorithms()) {
      if (codec.is_lossy() && make_plan(Collective::all_reduce, algorithm, 0, 1).exact) continue;
      CallOptions call;
      call.algorithm = algorithm;
      call.codec = codec.name;
      call.timeout = generous;
      const auto add = [&](int64_t numel, int segments) {
        call.segments = segments;
        call.average = numel % 2;
        out.push_back({call, numel});
      };
      if (all) {
        for (const int64_t numel : {0, 1, 17, 10007}) add(numel, 1);  // with few elements most chunks are empty
        add(10007, 3);
      } else if (world_size == 3 && codec.name == "raw") {
        add(17, 1);
      } else if (world_size != 3 && codec.name == "int8" && algorithm == "ring") {
        add(513, 3);
      }
    }
  }
  return out;
}

// Returns the values of a rank after each call.
std::vector<Values> reduce_all(const std::vector<Case>& cases, Executor& executor, Runner& runner, const ExecutionContext& context) {
  std::vector<Values> results;
  for (const auto& [call, numel] : cases) {
    const Array<float> array(context, given(executor.rank(), numel));
    runner.run(executor, {array.data()}, numel, call);
    results.push_back(array.values());
  }
  return results;
}

bool same_bits(const Values& a, const Values& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

class NcclAllReduceOn : public OverNccl {};
DLT_ON_EVERY_CONTEXT(NcclAllReduceOn);

TEST_P(NcclAllReduceOn, GivesTheBitsThatOtherTransportsGive) {
  const bool all = !is_slow(context());
  for (int world_size : all ? std::vector{1, 2, 3, 4, 5, 8} : std::vector{2, 3, 5}) {
    const std::vector<Case> todo = cases(world_size, all);
    std::vector<std::vector<Values>> expected(world_size), results(world_size);
    on_ranks(world_size, [&](Executor& executor, Runner& runner) { expected[executor.rank()] = reduce_all(todo, executor, runner, {}); });
    on_nccl_ranks(context(), world_size, [&](Executor& executor, Runner& runner, const ExecutionContext& context) {
      results[executor.rank()] = reduce_all(todo, executor, runner, context);
    });
    for (int rank = 0; rank < world_size; ++rank) {
      for (size_t i = 0; i < todo.size(); ++i) {
        const auto& [call, numel] = todo[i];
        EXPECT_TRUE(same_bits(results[rank][i], expected[rank][i]))
            << call.algorithm << " " << call.codec << " p=" << world_size << " n=" << numel << " segments=" << call.segments;
      }
    }
  }
}

class NcclExecutorOn : public OverNccl {};
DLT_ON_EVERY_CONTEXT(NcclExecutorOn);

TEST_P(NcclExecutorOn, LaunchesOnceForHalfATick) {
  for (const int world_size : context().on_cuda() ? std::vector{3} : std::vector{2, 3, 4}) {
    const int rounds = 2 * (world_size - 1);
    for (const int segments : {1, 3}) {
      fake().reset();
      on_nccl_ranks(context(), world_size, [&](Executor& executor, Runner& runner, const ExecutionContext& context) {
        CallOptions call;
        call.algorithm = "ring";
        call.segments = segments;
        const Array<float> array(context, Values(1000, 1.0f));
        runner.run(executor, {array.data()}, 1000, call);
        EXPECT_EQ(array.values(), Values(1000, static_cast<float>(world_size)));
      });
      // Of three segments, segment 1 has launches of its own; segments 0 and 2 are two ticks apart, and share theirs in the other ticks.
      const int launches = segments == 1 ? rounds : rounds + (rounds + 2);
      for (int rank = 0; rank < world_size; ++rank) {
        EXPECT_EQ(calls(call(rank, "ncclGroupEnd")), launches) << "p=" << world_size << " segments=" << segments;
        EXPECT_EQ(calls(call(rank, "ncclSend")), segments * rounds);
        EXPECT_EQ(calls(call(rank, "ncclRecv")), segments * rounds);
      }
    }
  }
}

TEST_P(NcclExecutorOn, UsesNcclsReduceScatterAndAllReduce) {
  constexpr int world_size = 3;
  struct Case {
    int numel, owners;
    const char* function;
    int times;
  };
  for (const auto& [numel, owners, function, times] :
       {Case{96, 3, "ncclReduceScatter", 1}, Case{50, 3, "ncclReduce", 3}, Case{96, 2, "ncclReduce", 2}, Case{50, 1, "ncclReduce", 1}}) {
    fake().reset();
    on_nccl_ranks(context(), world_size, [&, numel = numel, owners = owners](Executor& executor, Runner&, const ExecutionContext& context) {
      Values values(numel);
      for (int i = 0; i < numel; ++i) values[i] = static_cast<float>(i + executor.rank());
      const Array<float> array(context, values);
      const auto shards = shards_of(numel, owners, world_size);
      executor.reduce_scatter(context, array.data(), numel, shards, true, generous);
      executor.all_gather(context, array.data(), numel, shards, generous);
      for (int i = 0; i < numel; ++i) values[i] = static_cast<float>(i + 1);
      EXPECT_EQ(array.values(), values);
      executor.all_reduce_natively(context, array.data(), numel, ScalarType::fp32, false, generous);
      EXPECT_EQ(array.values()[numel - 1], static_cast<float>(world_size * numel));
    });
    EXPECT_EQ(calls(call(0, function)), times);
    EXPECT_EQ(calls(call(0, "ncclAllReduce")), 1);
  }
}

CallOptions by_ring(std::chrono::milliseconds timeout) {
  CallOptions call;
  call.algorithm = "ring";
  call.timeout = timeout;
  return call;
}

std::string next_error(Executor& executor, Runner& runner, const Array<float>& array) {
  return error_of<CollectiveError>([&] { runner.run(executor, {array.data()}, 100, by_ring(generous)); });
}

// On the CPU the exchange itself waits.
TEST(NcclExecutor, AbortEndsAWait) {
  fake().reset();
  std::latch over(1);
  on_nccl_ranks({}, 2, [&](Executor& executor, Runner& runner, const ExecutionContext& context) {
    if (executor.rank() == 1) return over.wait();
    const Array<float> array(context, Values(100, 1.0f));
    const auto start = Clock::now();
    std::thread other([&] {
      while (calls(call(0, "ncclGroupEnd")) == 0) std::this_thread::yield();
      executor.abort("closed by the test");
    });
    EXPECT_EQ(next_error(executor, runner, array), "closed by the test");
    other.join();
    EXPECT_LT(Clock::now() - start, generous);
    EXPECT_EQ(next_error(executor, runner, array), "closed by the test");
    over.count_down();
  });
}

// On CUDA calls only enqueue.
class NcclDeadline : public OverNccl {
 protected:
  // Runs body(executor, runner, context, array) on all ranks but the last, which only calls last(executor) instead.
  template <class Body>
  void expect_poisoned(int world_size, Body body, const std::function<void(Executor&)>& last = [](Executor&) {}) {
    std::latch over(world_size - 1);
    on_nccl_ranks(context(), world_size, [&](Executor& executor, Runner& runner, const ExecutionContext& context) {
      const Array<float> array(context, Values(100, 1.0f));
      executor.all_reduce_natively(context, array.data(), 100, ScalarType::fp32, true, generous);
      runner.run(executor, {array.data()}, 100, by_ring(generous));
      EXPECT_EQ(array.values(), Values(100, static_cast<float>(world_size)));
      if (executor.rank() == world_size - 1) {
        last(executor);
        return over.wait();
      }
      body(executor, runner, context, array);
      const Values values = array.values();
      EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float value) { return std::isnan(value); }));
      EXPECT_NE(executor.failure(), "");
      EXPECT_EQ(next_error(executor, runner, array), executor.failure());
      over.count_down();
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Contexts, NcclDeadline, testing::Values("cuda"), [](const auto& info) { return info.param; });

TEST_P(NcclDeadline, ARankThatNeverMakesTheCall) {
  expect_poisoned(3, [](Executor& executor, Runner& runner, const ExecutionContext&, const Array<float>& array) {
    const int rank = executor.rank();
    runner.run(executor, {array.data()}, 100, by_ring(std::chrono::milliseconds(300)));
    executor.drain();
    const std::string error = executor.failure();
    expect_in(text("all_reduce with ring on rank ", rank, " in a group of 3: waiting for rank ", (rank + 2) % 3, " in round 0 of 4"),
              error);
    expect_in("(deadline 0.3 s): nothing came", error);
  });
}

// The host waits for the peer in the first call.
TEST_P(NcclDeadline, ARankThatNeverConnects) {
  std::latch over(2);
  on_nccl_ranks(context(), 3, [&](Executor& executor, Runner& runner, const ExecutionContext& context) {
    const int rank = executor.rank();
    if (rank == 2) return over.wait();
    const Array<float> array(context, Values(100, 1.0f));
    const std::string error =
        error_of<CollectiveError>([&] { runner.run(executor, {array.data()}, 100, by_ring(std::chrono::milliseconds(300))); });
    expect_in(text("all_reduce with ring on rank ", rank, " in a group of 3: waiting for rank ", (rank + 2) % 3, " in round 0 of 4"),
              error);
    expect_in("(deadline 0.3 s): nothing came", error);
    EXPECT_EQ(executor.failure(), error);
    EXPECT_EQ(next_error(executor, runner, array), error);
    over.count_down();
  });
}

TEST_P(NcclDeadline, ARankThatNeverMakesTheNativeCall) {
  expect_poisoned(3, [](Executor& executor, Runner&, const ExecutionContext& context, const Array<float>& array) {
    const int rank = executor.rank();
    executor.all_reduce_natively(context, array.data(), 100, ScalarType::fp32, false, std::chrono::milliseconds(300));
    executor.drain();
    const std::string error = executor.failure();
    expect_in(
        text("all_reduce with native on rank ", rank, " in a group of 3: waiting for one of the ranks ", 1 - rank, ", 2 in round 0 of 1"),
        error);
    expect_in("(deadline 0.3 s): nothing came", error);
  });
}

// The poisoned message decodes to NaN in every codec.
TEST_P(NcclDeadline, PoisonsAMessageToo) {
  for (const char* codec : {"int8", "fp16", "bf16"}) {
    expect_poisoned(2, [codec](Executor& executor, Runner& runner, const ExecutionContext& context, const Array<float>& array) {
      CallOptions call = by_ring(std::chrono::milliseconds(300));
      call.codec = codec;
      const Encoded message = encoded(call, 100, 2);
      const Array<float> bytes(context, Values(message.bytes / sizeof(float), 1.0f));
      call.message = reinterpret_cast<char*>(bytes.data());
      runner.run(executor, {array.data()}, 100, call);
      executor.drain();
      std::vector<Decoding> room;
      decode(context, message.parts, call.message, {array.data()}, room);
    });
  }
}

TEST_P(NcclDeadline, ALateRankIsNamedOnAllOthersAtOnce) {
  auto channels = in_process_control_channels(3);
  std::latch begun(3), over(3);
  const auto watched = [&](Executor& executor) {
    auto failure_detector = std::make_shared<FailureDetector>(
        std::move(channels[executor.rank()]), std::vector<int>(),
        FailureDetector::Calls{[&] { return executor.waiting(); }, [&](const std::string& finding) { executor.give_up(finding); }},
        AdaptiveTimeout(std::chrono::milliseconds(500)));
    executor.set_failure_detector(failure_detector);
    begun.arrive_and_wait();
    return failure_detector;
  };
  const auto wait_and_close = [&](const std::shared_ptr<FailureDetector>& failure_detector) {
    over.arrive_and_wait();
    failure_detector->close();
  };
  expect_poisoned(
      3,
      [&](Executor& executor, Runner& runner, const ExecutionContext&, const Array<float>& array) {
        const auto failure_detector = watched(executor);
        failure_detector->begin();
        const auto deadline = executor.rank() == 0 ? std::chrono::milliseconds(300) : generous;
        runner.run(executor, {array.data()}, 100, by_ring(deadline));
        executor.drain();
        expect_in("the culprit is rank 2: it is alive, but has not made call 1 (found by rank 0 in round 0 of call 1)", executor.failure());
        wait_and_close(failure_detector);
      },
      [&](Executor& executor) { wait_and_close(watched(executor)); });
}

TEST_P(NcclDeadline, AnAbortPrecedesTheDeadline) {
  expect_poisoned(2, [](Executor& executor, Runner& runner, const ExecutionContext&, const Array<float>& array) {
    for (int i = 0; i < 2; ++i) runner.run(executor, {array.data()}, 100, by_ring(generous));
    EXPECT_EQ(executor.failure(), "");  // the calls have returned, and no message has arrived
    executor.abort("closed by the test");
    executor.drain();
    EXPECT_EQ(executor.failure(), "closed by the test");
  });
}

TEST_P(NcclDeadline, AnAsynchronousErrorPrecedesTheDeadline) {
  expect_poisoned(2, [](Executor& executor, Runner& runner, const ExecutionContext&, const Array<float>& array) {
    runner.run(executor, {array.data()}, 100, by_ring(generous));
    fake().set_error(0, 2);
    executor.drain();
    expect_in("waiting for rank 1 in round 0 of 2", executor.failure());
    expect_in("NCCL 2.28.9: in the background: unhandled system error (as the test wishes)", executor.failure());
  });
}

TEST_P(NcclDeadline, ARankThatAbortsPrecedesTheDeadline) {
  const auto abort = [](Executor& executor) {
    while (calls(call(0, "ncclGroupEnd")) < 1 + 2 * 2) std::this_thread::yield();  // one launch, and those of two calls of two rounds
    fake().tell_of_aborts();
    executor.abort("closed by the test");
  };
  const auto body = [](Executor& executor, Runner& runner, const ExecutionContext&, const Array<float>& array) {
    runner.run(executor, {array.data()}, 100, by_ring(generous));
    executor.drain();
    expect_in("in the background: remote process exited or there was a network error (a rank has aborted)", executor.failure());
  };
  expect_poisoned(2, body, abort);
}

// The memory that the device uses afterwards still exists, and the device does not wait for the peer.
TEST_P(NcclDeadline, TheEndOfTheExecutorPrecedesTheDeadline) {
  std::latch over(1);
  on_transports(context(), 2, [&](std::unique_ptr<Transport> transport, const ExecutionContext& context) {
    Runner runner(context);
    const Array<float> array(context, Values(100, 1.0f));
    auto executor = std::make_unique<Executor>(std::move(transport));
    runner.run(*executor, {array.data()}, 100, by_ring(generous));
    if (executor->rank() == 1) return over.wait();
    runner.run(*executor, {array.data()}, 100, by_ring(generous));
    executor.reset();
    EXPECT_TRUE(std::isnan(array.values()[0]));
    over.count_down();
  });
}

}  // namespace
}  // namespace dltrain::comm::nccl
