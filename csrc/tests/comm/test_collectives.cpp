// Tests the collectives except all-reduce, with every plan and on every execution context.

#include <cmath>
#include <limits>

#include "tests/comm/ranks.h"
#include "tests/contexts.h"

namespace dltrain::comm {
namespace {

// Small integers: their sums are exact in any order, and int8 represents them exactly if the largest of each block is 127.
float given(int rank, int64_t i) { return i % 128 == 0 ? 127.0f : static_cast<float>((i * 7 + rank * 13) % 31 - 15); }

class CollectivesOn : public OnEveryContext {
 protected:
  bool all() const { return !is_slow(context()); }

  // Calls test(executor, runner, options) on each rank, with each plan, in raw and in int8, with one segment and with three.
  template <class Test>
  void by_every_plan(Collective collective, int world_size, Test test) const {
    for (const std::string& algorithm : algorithms(collective)) {
      for (const char* codec : {"raw", "int8"}) {
        for (const int segments : {1, 3}) {
          CallOptions call;
          call.collective = collective;
          call.algorithm = algorithm;
          call.codec = codec;
          call.segments = segments;
          SCOPED_TRACE(text(name(collective), " by ", algorithm, " in ", codec, ", p=", world_size, " segments=", segments));
          on_ranks(world_size, [&](Executor& executor, Runner& runner) { test(executor, runner, call); }, context());
        }
      }
    }
  }
};
DLT_ON_EVERY_CONTEXT(CollectivesOn);

TEST_P(CollectivesOn, ReduceScatterGivesEachRankItsShard) {
  for (int world_size : all() ? std::vector{1, 2, 3, 5, 8} : std::vector{1, 3}) {
    for (int64_t count : all() ? std::vector<int64_t>{0, 1, 127, 1280, 10'007} : std::vector<int64_t>{0, 1280}) {
      by_every_plan(Collective::reduce_scatter, world_size, [&](Executor& executor, Runner& runner, CallOptions call) {
        const int64_t numel = count * world_size;
        std::vector<float> values(numel);
        // A shard has its own blocks: in int8 each begins with its largest element.
        for (int64_t i = 0; i < numel; ++i) values[i] = given(executor.rank(), count ? i % count : 0);
        const Array<float> from(context(), values), to(context(), std::vector<float>(count, -1.0f));
        call.shard = {to.data()};
        runner.run(executor, {from.data()}, numel, call);
        const auto shard = to.values();
        const bool exact = call.codec == "raw" || call.algorithm == "direct";  // the ring sends sums above 127 on
        for (int64_t i = 0; i < count && exact; ++i) {
          float sum = 0;
          for (int rank = 0; rank < world_size; ++rank) sum += given(rank, i);
          ASSERT_EQ(shard[i], sum) << "n=" << count << " i=" << i;
        }
        EXPECT_EQ(from.values(), values) << "the input does not change";
      });
    }
  }
}

// Shards may be uneven or empty.
TEST_P(CollectivesOn, AllGatherGivesAllRanksAllShards) {
  for (int world_size : all() ? std::vector{1, 2, 3, 5, 8} : std::vector{1, 3}) {
    for (int64_t count : all() ? std::vector<int64_t>{0, 1, 127, 10'007} : std::vector<int64_t>{0, 1280}) {
      for (const bool even : {true, false}) {
        std::vector<Span> shards;
        int64_t numel = 0;
        for (int rank = 0; rank < world_size; ++rank) {
          shards.push_back({numel, even ? count : rank % 3 == 1 ? 0 : count + 5 * rank});
          numel += shards.back().count;
        }
        by_every_plan(Collective::all_gather, world_size, [&](Executor& executor, Runner& runner, CallOptions call) {
          std::vector<float> values(numel, -1.0f), expected;
          for (int rank = 0; rank < world_size; ++rank) {
            for (int64_t i = 0; i < shards[rank].count; ++i) expected.push_back(given(rank, i));
          }
          const auto [first, own] = shards[executor.rank()];
          std::copy_n(expected.begin() + first, own, values.begin() + first);
          const Array<float> array(context(), values);
          if (!even) call.shards = shards;
          runner.run(executor, {array.data()}, numel, call);
          EXPECT_EQ(array.values(), expected) << "n=" << count << " even=" << even << " rank=" << executor.rank();
        });
      }
    }
  }
}

// Both collectives are in place, and what belongs to a rank is not adjacent. An element that no region contains does not change.
TEST_P(CollectivesOn, RegionsMayHaveOwners) {
  const int64_t sizes[] = {1280, 3, 0, 5000, 129};
  for (int world_size : all() ? std::vector{1, 2, 3, 5} : std::vector{1, 3}) {
    for (const char* codec : {"raw", "int8"}) {
      Layout layout;
      int64_t numel = 0;
      for (const int64_t size : sizes) {
        for (int owner = 0; owner < world_size; ++owner) {
          layout.push_back({{numel, size}, &find_codec(codec), (numel + 3) / 4 * 4, owner});
          numel += size;
        }
        ++numel;
      }
      by_every_plan(Collective::reduce_scatter, world_size, [&](Executor& executor, Runner& runner, CallOptions call) {
        if (call.codec != std::string(codec)) return;
        std::vector<float> values(numel, 5.0f), expected(numel, 5.0f);
        for (const Region& region : layout) {
          for (int64_t i = 0; i < region.span.count; ++i) {
            float sum = 0;
            for (int rank = 0; rank < world_size; ++rank) sum += given(rank, i);
            values[region.span.first + i] = given(executor.rank(), i);
            expected[region.span.first + i] = sum;
          }
        }
        const Array<float> array(context(), values);
        call.layout = &layout;
        runner.run(executor, {array.data()}, numel, call);
        const auto shards = array.values();
        const bool exact = call.codec == "raw" || call.algorithm == "direct";
        std::vector<float> scattered(numel, -1.0f);  // what is given to the all-gather
        for (const Region& region : layout) {
          if (region.owner != executor.rank()) continue;
          for (int64_t i = 0; i < region.span.count; ++i) {
            const int64_t k = region.span.first + i;
            ASSERT_TRUE(!exact || shards[k] == expected[k]) << shards[k] << " for " << expected[k] << " at " << k;
            scattered[k] = given(0, i);
          }
        }
        call.collective = Collective::all_gather;
        const Array<float> parts(context(), scattered);
        runner.run(executor, {parts.data()}, numel, call);
        const auto whole = parts.values();
        std::vector<float> gathered(numel, -1.0f);
        for (const Region& region : layout) {
          for (int64_t i = 0; i < region.span.count; ++i) gathered[region.span.first + i] = given(0, i);
        }
        EXPECT_EQ(whole, gathered);
      });
    }
  }
}

TEST_P(CollectivesOn, BroadcastGivesAllRanksTheTensorOfTheRoot) {
  for (int world_size : all() ? std::vector{1, 2, 3, 5, 8} : std::vector{1, 3}) {
    for (int64_t count : all() ? std::vector<int64_t>{0, 1, 127, 10'007} : std::vector<int64_t>{0, 1280}) {
      for (const int root : {0, world_size - 1}) {
        by_every_plan(Collective::broadcast, world_size, [&](Executor& executor, Runner& runner, CallOptions call) {
          std::vector<float> values(count, std::numeric_limits<float>::quiet_NaN()), expected;
          for (int64_t i = 0; i < count; ++i) expected.push_back(given(root, i));
          const Array<float> array(context(), executor.rank() == root ? expected : values);
          call.root = root;
          runner.run(executor, {array.data()}, count, call);
          EXPECT_EQ(array.values(), expected) << "n=" << count << " root=" << root << " rank=" << executor.rank();
        });
      }
    }
  }
}

TEST_P(CollectivesOn, ReduceGivesTheRootTheSum) {
  for (int world_size : all() ? std::vector{1, 2, 3, 5, 8} : std::vector{1, 3}) {
    for (int64_t count : all() ? std::vector<int64_t>{0, 1, 127, 10'007} : std::vector<int64_t>{0, 1280}) {
      for (const int root : {0, world_size - 1}) {
        by_every_plan(Collective::reduce, world_size, [&](Executor& executor, Runner& runner, CallOptions call) {
          if (call.codec != std::string("raw")) return;
          std::vector<float> values, expected(count);
          for (int64_t i = 0; i < count; ++i) {
            values.push_back(given(executor.rank(), i));
            for (int rank = 0; rank < world_size; ++rank) expected[i] += given(rank, i);
          }
          const Array<float> array(context(), values);
          call.root = root;
          runner.run(executor, {array.data()}, count, call);
          if (executor.rank() == root) {
            EXPECT_EQ(array.values(), expected) << "n=" << count << " root=" << root;
          }
        });
      }
    }
  }
}

// With a codec all ranks have the same bits, and the errors are those of the messages: the residuals contain what is lost.
TEST(Collectives, KeepTheLossInResiduals) {
  constexpr int world_size = 3;
  constexpr int64_t numel = 3 * 1001;
  const auto value = [](int rank, int64_t i) { return std::sin(static_cast<float>(i + 1) * static_cast<float>(rank + 2)); };
  for (const Collective collective : {Collective::all_gather, Collective::broadcast, Collective::reduce}) {
    for (const std::string& algorithm : algorithms(collective)) {
      std::vector<std::vector<float>> results(world_size), residuals(world_size, std::vector<float>(numel));
      on_ranks(world_size, [&](Executor& executor, Runner&) {
        const int rank = executor.rank();
        auto& values = results[rank];
        for (int64_t i = 0; i < numel; ++i) values.push_back(value(rank, i));
        CallOptions call;
        call.collective = collective;
        call.algorithm = algorithm;
        call.codec = "int4";
        call.root = is_rooted(collective) ? 1 : 0;
        call.feedback.residual = {residuals[rank].data()};  // of an all-gather, only of the rank's shard
        executor.run({}, {values.data()}, numel, call);
      });
      for (int64_t i = 0; i < numel; ++i) {
        float whole = 0;
        for (int rank = 0; rank < world_size; ++rank) {
          if (collective == Collective::reduce) whole += value(rank, i);
        }
        if (collective == Collective::all_gather) whole = value(static_cast<int>(i / (numel / 3)), i);
        if (collective == Collective::broadcast) whole = value(1, i);
        for (int rank = 0; rank < world_size && collective != Collective::all_gather; ++rank) whole -= residuals[rank][i];
        if (collective == Collective::all_gather) whole -= residuals[i / (numel / 3)][i % (numel / 3)];
        ASSERT_NEAR(results[1][i], whole, 1e-5f) << name(collective) << " by " << algorithm << " i=" << i;
        if (collective == Collective::reduce) continue;
        ASSERT_EQ(results[0][i], results[1][i]);
        ASSERT_EQ(results[2][i], results[1][i]);
      }
    }
  }
}

TEST(Collectives, NameTheCallsThatDiffer) {
  on_ranks(2, [&](Executor& executor, Runner&) {
    std::vector<float> values(8);
    CallOptions call;
    call.collective = executor.rank() == 0 ? Collective::all_gather : Collective::reduce_scatter;
    call.timeout = std::chrono::seconds(5);
    try {
      executor.run({}, {values.data()}, 8, call);
      FAIL() << "not noticed";
    } catch (const CollectiveError& error) {
      const std::string said = error.what();
      EXPECT_EQ(said.find(executor.rank() == 0 ? "all_gather with direct on rank 0" : "reduce_scatter with direct on rank 1"), 0) << said;
    }
  });
}

TEST(ReduceScatter, AveragesAndKeepsResiduals) {
  constexpr int world_size = 3;
  constexpr int64_t count = 1000, numel = count * world_size;
  const auto value = [](int rank, int64_t i) { return std::sin(static_cast<float>(i + 1) * static_cast<float>(rank + 2)); };
  std::vector<std::vector<float>> shards(world_size), residuals(world_size, std::vector<float>(numel));
  on_ranks(world_size, [&](Executor& executor, Runner&) {
    const int rank = executor.rank();
    std::vector<float> values(numel), shard(count);
    for (int64_t i = 0; i < numel; ++i) values[i] = value(rank, i);
    CallOptions call;
    call.collective = Collective::reduce_scatter;
    call.codec = "int4";
    call.average = true;
    call.shard = {shard.data()};
    call.feedback.residual = {residuals[rank].data()};
    executor.run({}, {values.data()}, numel, call);
    EXPECT_EQ(executor.wire_bytes(), 2 * find_codec("int4").bytes(count)) << "each shard is sent once to its owner";
    shards[rank] = shard;
  });
  for (int owner = 0; owner < world_size; ++owner) {
    for (int64_t i = 0; i < count; ++i) {
      float whole = shards[owner][i], average = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        average += value(rank, owner * count + i) / world_size;
        whole += residuals[rank][owner * count + i];
      }
      ASSERT_NEAR(whole, average, 1e-5f);
      ASSERT_EQ(residuals[owner][owner * count + i], 0.0f) << "a rank's own shard is not encoded";
    }
  }
}

TEST(ReduceScatter, NeedsEqualShards) {
  on_ranks(2, [&](Executor& executor, Runner&) {
    std::vector<float> values(3);
    CallOptions call;
    call.collective = Collective::reduce_scatter;
    EXPECT_THROW(executor.run({}, {values.data()}, 3, call), std::invalid_argument);
  });
}

// Each element is in exactly one chunk, and elements of different ranks never use the same random number.
TEST(ReduceScatter, DividesShardsIntoChunks) {
  for (const int64_t count : {0, 1, 5, 1000, 100'003}) {
    for (const int64_t shards : {1, 3, 4}) {
      for (const int segments : {1, 3}) {
        std::vector<int> covered(count * shards);
        for (const auto& pieces : cut_in_shards(equal_shards(count * shards, static_cast<int>(shards)), find_codec("int8"), segments)) {
          for (const Piece& piece : pieces) {
            for (int64_t owner = 0; owner < shards; ++owner) {
              const Piece part = piece.part(shards, owner);
              EXPECT_EQ(part.number % 4, 0);
              for (int64_t i = 0; i < part.span.count; ++i) {
                EXPECT_EQ((part.span.first + i) / count, owner);
                ++covered[part.span.first + i];
              }
            }
          }
        }
        for (const int times : covered) ASSERT_EQ(times, 1);
      }
    }
  }
}

}  // namespace
}  // namespace dltrain::comm
