// Each rank's share of a sum, on every place.

#include <cmath>
#include <limits>

#include "tests/places.h"
#include "tests/ranks.h"

namespace dltrain::comm {
namespace {

// Small integers: their sums are exact in any order, and int8 with 127 as the largest of each block holds them as they are.
float given(int rank, int64_t i) { return i % 128 == 0 ? 127.0f : static_cast<float>((i * 7 + rank * 13) % 31 - 15); }

class ReduceScatterOn : public OnEveryPlace {};
DLT_ON_EVERY_PLACE(ReduceScatterOn);

TEST_P(ReduceScatterOn, GivesEachRankItsShare) {
  const bool all = !is_slow(place());
  for (const char* codec : {"raw", "int8"}) {
    for (int world_size : all ? std::vector{1, 2, 3, 5, 8} : std::vector{1, 3}) {
      for (int64_t count : all ? std::vector<int64_t>{0, 1, 127, 1280, 10'007} : std::vector<int64_t>{0, 1280}) {
        for (int segments : {1, 3}) {
          on_ranks(
              world_size,
              [&](Executor& executor, Runner& runner) {
                const int64_t numel = count * world_size;
                std::vector<float> values(numel);
                // A share's own blocks: in int8 each begins with its largest.
                for (int64_t i = 0; i < numel; ++i) values[i] = given(executor.rank(), count ? i % count : 0);
                const Array<float> from(place(), values), to(place(), std::vector<float>(count, -1.0f));
                AllReduce call;
                call.codec = codec;
                call.segments = segments;
                runner.reduce_scatter(executor, {to.data()}, {from.data()}, numel, call);
                const auto share = to.values();
                for (int64_t i = 0; i < count; ++i) {
                  float sum = 0;
                  for (int rank = 0; rank < world_size; ++rank) sum += given(rank, i);
                  ASSERT_EQ(share[i], sum) << codec << " p=" << world_size << " n=" << count << " segments=" << segments << " i=" << i;
                }
                EXPECT_EQ(from.values(), values) << "what is given stays";
              },
              place());
        }
      }
    }
  }
}

TEST(ReduceScatter, AveragesAndKeepsWhatIsLost) {
  constexpr int world_size = 3;
  constexpr int64_t count = 1000, numel = count * world_size;
  const auto value = [](int rank, int64_t i) { return std::sin(static_cast<float>(i + 1) * static_cast<float>(rank + 2)); };
  std::vector<std::vector<float>> shares(world_size), residuals(world_size, std::vector<float>(numel));
  on_ranks(world_size, [&](Executor& executor, Runner&) {
    const int rank = executor.rank();
    std::vector<float> values(numel), share(count);
    for (int64_t i = 0; i < numel; ++i) values[i] = value(rank, i);
    AllReduce call;
    call.codec = "int4";
    call.average = true;
    call.feedback.residual = {residuals[rank].data()};
    executor.reduce_scatter({}, {share.data()}, {values.data()}, numel, call);
    EXPECT_EQ(executor.wire_bytes(), 2 * find_codec("int4").bytes(count)) << "each share once to its owner";
    shares[rank] = share;
  });
  for (int owner = 0; owner < world_size; ++owner) {
    for (int64_t i = 0; i < count; ++i) {
      float whole = shares[owner][i], average = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        average += value(rank, owner * count + i) / world_size;
        whole += residuals[rank][owner * count + i];
      }
      ASSERT_NEAR(whole, average, 1e-5f);
      ASSERT_EQ(residuals[owner][owner * count + i], 0.0f) << "what is mine is not encoded";
    }
  }
}

TEST(ReduceScatter, WantsEqualShares) {
  on_ranks(2, [&](Executor& executor, Runner&) {
    std::vector<float> values(3), share(1);
    EXPECT_THROW(executor.reduce_scatter({}, {share.data()}, {values.data()}, 3, {}), std::invalid_argument);
  });
}

// No element is in two chunks, none is left out, and those of different ranks never share a random number.
TEST(ReduceScatter, CutsShares) {
  for (const int64_t count : {0, 1, 5, 1000, 100'003}) {
    for (const int64_t shares : {1, 3, 4}) {
      for (const int segments : {1, 3}) {
        std::vector<int> covered(count * shares);
        for (const auto& pieces : cut_in_shares(count * shares, shares, find_codec("int8"), segments)) {
          for (const Piece& piece : pieces) {
            for (int64_t owner = 0; owner < shares; ++owner) {
              const Piece part = piece.part(shares, owner);
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
