// Tests every plan with every codec over the in-process transport.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "comm/plan/plan.h"
#include "kernels/codec.h"
#include "tests/comm/ranks.h"
#include "tests/contexts.h"

namespace dltrain::comm {
namespace {

// Returns the contribution of a rank, which depends only on the arguments.
std::vector<float> given(int rank, int64_t numel, uint32_t seed = 0) {
  std::mt19937 random(1 + 1000 * seed + rank);
  std::normal_distribution<float> normal;
  std::vector<float> values(numel);
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<std::string> fitting(const Codec& codec) {
  std::vector<std::string> names;
  for (const std::string& algorithm : algorithms()) {
    if (!codec.is_lossy() || !make_plan(Collective::all_reduce, algorithm, 0, 1).exact) names.push_back(algorithm);
  }
  return names;
}

// Returns the values of all ranks after an all-reduce of the values that `fill` gives.
template <class Fill>
std::vector<std::vector<float>> all_reduce(const ExecutionContext& context, int world_size, const CallOptions& call, Fill fill) {
  std::vector<std::vector<float>> results(world_size);
  on_ranks(
      world_size,
      [&](Executor& executor, Runner& runner) {
        const std::vector<float> values = fill(executor.rank());
        const Array<float> array(context, values);
        runner.run(executor, {array.data()}, std::ssize(values), call);
        results[executor.rank()] = array.values();
      },
      context);
  return results;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

class AllReduceOn : public OnEveryContext {
 protected:
  // All ranks have the same bits, and these are near the sum: each rank encodes an element at most twice, so the error is below twice the
  // codec's bound times the sum of all largest magnitudes.
  void expect_identical_and_near(const Codec& codec, int world_size, int64_t numel, int segments) {
    std::vector<double> sum(numel);
    double largest = 0.0;
    for (int rank = 0; rank < world_size; ++rank) {
      double own = 0.0;
      const std::vector<float> values = given(rank, numel);
      for (int64_t i = 0; i < numel; ++i) {
        sum[i] += values[i];
        own = std::max(own, static_cast<double>(std::abs(values[i])));
      }
      largest += own;
    }
    for (const std::string& algorithm : fitting(codec)) {
      CallOptions call;
      call.algorithm = algorithm;
      call.codec = codec.name;
      call.segments = segments;
      const auto results = all_reduce(context(), world_size, call, [&](int rank) { return given(rank, numel); });
      const std::string where = text(algorithm, " ", codec.name, " p=", world_size, " n=", numel, " segments=", segments);
      for (const auto& result : results) ASSERT_TRUE(same_bits(result, results[0])) << where;
      const double bound = (codec.nearest_error.max * (world_size + 1) + 1e-5) * largest;
      for (int64_t i = 0; i < numel; ++i) ASSERT_NEAR(results[0][i], sum[i], bound) << where << " i=" << i;
    }
  }
};
DLT_ON_EVERY_CONTEXT(AllReduceOn);

TEST_P(AllReduceOn, GivesAllRanksTheSameBits) {
  // An emulated device is slow, so it only runs the limiting cases.
  const bool all = !is_slow(context());
  for (const Codec& codec : codecs()) {
    for (int world_size : all ? std::vector{1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16} : std::vector{3}) {
      const auto p = static_cast<int64_t>(world_size);
      const int64_t block = codec.alignment;
      const std::vector<int64_t> lengths = all ? std::vector<int64_t>{0, 1, p - 1, p + 1, p * block - 1, p * block, p * block + 1, 5003}
                                               : std::vector<int64_t>{p * block + 1};
      for (int64_t numel : lengths) expect_identical_and_near(codec, world_size, numel, 1);
      if (all) expect_identical_and_near(codec, world_size, 5003, 3);
    }
  }
}

TEST(AllReduce, GivesTheSameBitsForMillionsOfElements) {
  for (const Codec& codec : codecs()) {
    for (const std::string& algorithm : fitting(codec)) {
      CallOptions call;
      call.algorithm = algorithm;
      call.codec = codec.name;
      const auto fill = [](int rank) {
        std::vector<float> values(3'000'017);
        for (size_t i = 0; i < values.size(); ++i)
          values[i] = static_cast<float>(static_cast<int>((i * 7919 + rank * 104729) % 2001) - 1000);
        return values;
      };
      const auto results = all_reduce({}, 3, call, fill);
      EXPECT_TRUE(same_bits(results[1], results[0]) && same_bits(results[2], results[0])) << algorithm << " " << codec.name;
      if (!codec.is_lossy()) {
        const auto a = fill(0), b = fill(1), c = fill(2);
        for (size_t i = 0; i < a.size(); ++i) ASSERT_EQ(results[0][i], a[i] + b[i] + c[i]) << algorithm << " i=" << i;
      }
    }
  }
}

TEST(AllReduce, IsTheSameIfItIsRepeated) {
  for (const std::string& algorithm : fitting(find_codec("int8"))) {
    CallOptions call;
    call.algorithm = algorithm;
    call.codec = "int8";
    call.stochastic = true;
    call.seed = 7;
    const auto fill = [](int rank) { return given(rank, 10'000); };
    const auto results = all_reduce({}, 5, call, fill);
    EXPECT_TRUE(same_bits(results[0], all_reduce({}, 5, call, fill)[3])) << algorithm;
    call.seed = 8;
    EXPECT_FALSE(same_bits(results[0], all_reduce({}, 5, call, fill)[3])) << algorithm;
  }
}

TEST(AllReduce, SpreadsNonFiniteValuesToAllRanks) {
  for (const Codec& codec : codecs()) {
    for (const std::string& algorithm : fitting(codec)) {
      CallOptions call;
      call.algorithm = algorithm;
      call.codec = codec.name;
      const auto results = all_reduce({}, 4, call, [](int rank) {
        std::vector<float> values(4000, 1.0f);
        if (rank == 2) values[1234] = std::numeric_limits<float>::infinity();
        return values;
      });
      for (const auto& result : results) {
        ASSERT_TRUE(same_bits(result, results[0])) << algorithm << " " << codec.name;
        EXPECT_FALSE(std::isfinite(result[1234])) << algorithm << " " << codec.name;
        EXPECT_TRUE(std::isfinite(result[1234 - 256]) && std::isfinite(result[1234 + 256])) << algorithm << " " << codec.name;
      }
    }
  }
}

// The variance that stochastic int8 adds to a sum over p ranks, relative to the variance that it adds to one rank's part. Noise is
// proportional to the variance of what is encoded, which is k for a sum of k parts.
TEST(AllReduce, AddsTheNoiseThatItsPlanImplies) {
  constexpr int64_t numel = 1 << 18;
  std::vector<std::vector<float>> inputs;
  for (int rank = 0; rank < 16; ++rank) inputs.push_back(given(rank, numel));
  const auto noise = [&](int world_size, const std::string& algorithm) {
    CallOptions call;
    call.algorithm = algorithm;
    call.codec = "int8";
    call.stochastic = true;
    const auto results = all_reduce({}, world_size, call, [&](int rank) { return inputs[rank]; });
    std::vector<double> error(results[0].begin(), results[0].end());
    for (int rank = 0; rank < world_size; ++rank) {
      for (int64_t i = 0; i < numel; ++i) error[i] -= inputs[rank][i];
    }
    double squares = 0.0;
    for (double each : error) squares += each * each;
    return squares / numel;
  };
  const double word = noise(1, "direct");
  for (const int p : {4, 8, 16}) {
    const int log2 = std::countr_zero(static_cast<unsigned>(p));
    const std::map<std::string, int> expected = {{"ring", p * (p - 1) / 2 + p}, {"tree", p * log2 + 1},
                                                 {"double_tree", p * log2 + 1}, {"halving_doubling", p / 2 * log2 + p},
                                                 {"direct", 2 * p - 1},         {"oneshot", p}};
    for (const auto& [algorithm, times] : expected) {
      EXPECT_NEAR(noise(p, algorithm) / word, times, 0.04 * times) << algorithm << " p=" << p;
    }
  }
}

// Random numbers depend on rank and element: what a rank encodes of a tensor in chunks equals what it would encode of the whole.
TEST(AllReduce, DrawsForEachElementItsOwnNumber) {
  const Codec& codec = find_codec("int8");
  constexpr int64_t numel = 3 * 256;
  CallOptions call;
  call.algorithm = "direct";
  call.codec = "int8";
  call.stochastic = true;
  call.seed = 5;
  const auto results = all_reduce({}, 3, call, [](int rank) { return rank == 0 ? given(0, numel) : std::vector<float>(numel); });
  // Chunk 1 is nonzero only on rank 0, which encodes it; rank 1 adds zeros and encodes it once more.
  auto once = given(0, numel);
  for (const uint32_t rank : {0u, 1u}) {
    std::vector<uint8_t> message(codec.bytes(numel));
    Sum sum;
    sum.numel = numel;
    sum.own = sum.decoded = {once.data()};
    sum.message = message.data();
    sum.rounding.stochastic = true;
    sum.rounding.random = {5, 1, rank};
    codec.encode_sum({}, sum);
  }
  EXPECT_TRUE(std::equal(results[0].begin() + 256, results[0].begin() + 512, once.begin() + 256));
}

// The codec is exact, so this shows that the residual is added exactly once.
TEST(AllReduce, AddsTheResidualOnce) {
  for (const std::string& algorithm : algorithms()) {
    on_ranks(4, [&](Executor& executor, Runner&) {
      std::vector<float> values(999, 1.0f), residual(999, 0.25f);
      CallOptions call;
      call.algorithm = algorithm;
      call.feedback.residual = {residual.data()};
      executor.run({}, {values.data()}, 999, call);
      EXPECT_EQ(values, std::vector<float>(999, 5.0f)) << algorithm;
      EXPECT_EQ(residual, std::vector<float>(999, 0.0f)) << algorithm;
    });
  }
}

// Over the steps, the results and the remaining residuals of all ranks add up to the inputs.
TEST(AllReduce, FeedsBackWhatItLoses) {
  constexpr int world_size = 5, steps = 200;
  constexpr int64_t numel = 1500;
  std::vector<std::vector<float>> inputs[world_size];
  std::vector<double> exact(numel);
  for (int rank = 0; rank < world_size; ++rank) {
    for (int step = 0; step < steps; ++step) {
      const auto& values = inputs[rank].emplace_back(given(rank, numel, step));
      for (int64_t i = 0; i < numel; ++i) exact[i] += values[i] / static_cast<double>(world_size);
    }
  }
  for (const Codec& codec : codecs()) {
    for (const std::string& algorithm : fitting(codec)) {
      std::vector<std::vector<double>> received(world_size, std::vector<double>(numel)), left(world_size);
      on_ranks(world_size, [&](Executor& executor, Runner&) {
        std::vector<float> residual(numel);
        for (int step = 0; step < steps; ++step) {
          auto values = inputs[executor.rank()][step];
          CallOptions call;
          call.algorithm = algorithm;
          call.codec = codec.name;
          call.average = true;
          call.feedback.residual = {residual.data()};
          executor.run({}, {values.data()}, numel, call);
          for (int64_t i = 0; i < numel; ++i) received[executor.rank()][i] += values[i];
        }
        left[executor.rank()].assign(residual.begin(), residual.end());
      });
      for (int64_t i = 0; i < numel; ++i) {
        double total = received[0][i];
        for (const auto& each : left) total += each[i];
        ASSERT_NEAR(total, exact[i], 1e-4) << algorithm << " " << codec.name << " i=" << i;
      }
    }
  }
}

TEST(AllReduce, TakesHalves) {
  for (const Codec& codec : codecs()) {
    for (const std::string& algorithm : fitting(codec)) {
      for (const Dtype dtype : {Dtype::fp16, Dtype::bf16}) {
        constexpr int world_size = 3;
        constexpr int64_t numel = 1111;
        std::vector<std::vector<uint16_t>> results(world_size, std::vector<uint16_t>(numel));
        std::vector<float> sum(numel);
        for (int rank = 0; rank < world_size; ++rank) {
          for (int64_t i = 0; i < numel; ++i) {
            const auto value = static_cast<float>((i * 7 + rank * 13) % 31 - 15);
            results[rank][i] = dtype == Dtype::fp16 ? narrow<Half>(value).bits : narrow<BFloat16>(value).bits;
            sum[i] += value;
          }
        }
        on_ranks(world_size, [&](Executor& executor, Runner&) {
          CallOptions call;
          call.algorithm = algorithm;
          call.codec = codec.name;
          executor.run({}, {results[executor.rank()].data(), dtype}, numel, call);
        });
        EXPECT_EQ(results[0], results[1]);
        EXPECT_EQ(results[0], results[2]);
        if (codec.is_lossy()) continue;
        for (int64_t i = 0; i < numel; ++i) {
          const float value = dtype == Dtype::fp16 ? widen(Half{results[0][i]}) : widen(BFloat16{results[0][i]});
          ASSERT_EQ(value, sum[i]) << algorithm << " i=" << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace dltrain::comm
