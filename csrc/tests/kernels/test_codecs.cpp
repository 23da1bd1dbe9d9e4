#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "kernels/codec.h"
#include "math/philox.h"
#include "tests/contexts.h"

namespace dltrain {
namespace {

using Bytes = std::vector<uint8_t>;

// Makes numbers of all kinds, by blocks: ordinary ones, wide ones, zeros, denormals, the largest, and some with a NaN or an infinity.
std::vector<float> numbers(int64_t numel, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out;
  for (int64_t i = 0; i < numel; ++i) {
    const float x = normal(random);
    switch (i / 256 % 7) {
      case 0: out.push_back(x); break;
      case 1: out.push_back(std::ldexp(x, static_cast<int>(random() % 200) - 120)); break;
      case 2: out.push_back(x < 0 ? -0.0f : 0.0f); break;
      case 3: out.push_back(std::ldexp(x, -130)); break;
      case 4: out.push_back(x < 0 ? -std::numeric_limits<float>::max() : std::numeric_limits<float>::max()); break;
      case 5: out.push_back(i % 256 == 77 ? std::numeric_limits<float>::quiet_NaN() : x); break;
      default: out.push_back(i % 256 == 3 ? -std::numeric_limits<float>::infinity() : x);
    }
  }
  return out;
}

Bytes as_elements(const std::vector<float>& values, Dtype dtype) {
  Bytes out;
  const auto put = [&](const auto& element) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(&element);
    out.insert(out.end(), bytes, bytes + sizeof(element));
  };
  for (const float x : values) {
    if (dtype == Dtype::fp32) put(x);
    if (dtype == Dtype::fp16) put(narrow<Half>(x));
    if (dtype == Dtype::bf16) put(narrow<BFloat16>(x));
  }
  return out;
}

int64_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

struct Case {
  const Codec& codec;
  int64_t numel;
  Dtype dtype = Dtype::fp32;
  int received = 0;
  bool residual = false;
  bool stochastic = false;
  bool unaligned = false;
};

struct Result {
  Bytes message, decoded, residual, values;
  double sum_squares;
  float found_inf;
};

Bytes message_on_cpu(const Codec& codec, const std::vector<float>& values) {
  Bytes out(codec.bytes(static_cast<int64_t>(values.size())));
  Sum sum;
  sum.numel = static_cast<int64_t>(values.size());
  sum.own = {const_cast<float*>(values.data())};
  sum.message = out.data();
  codec.encode_sum(cpu_context(), sum);
  return out;
}

// Encodes and decodes on an execution context.
Result run(const ExecutionContext& context, const Case& c) {
  const int64_t offset = c.unaligned ? size_of(c.dtype) : 0;
  const Array<uint8_t> own(context, as_elements(numbers(c.numel, 1), c.dtype), offset);
  const Array<uint8_t> decoded(context, Bytes(c.numel * size_of(c.dtype)), offset),
      values(context, Bytes(c.numel * 4), c.unaligned ? 4 : 0);
  const Array<float> residual(context, std::vector<float>(c.numel, 0.01f), c.unaligned ? 1 : 0), loss_scale(context, {3.0f});
  const Array<uint8_t> message(context, Bytes(c.codec.bytes(c.numel)), c.unaligned ? 4 : 0);
  std::vector<std::unique_ptr<Array<uint8_t>>> received;
  std::vector<const uint8_t*> pointers;
  for (int k = 0; k < c.received; ++k) {
    const Bytes bytes = message_on_cpu(c.codec, std::vector<float>(c.numel, 0.5f + static_cast<float>(k)));
    pointers.push_back(received.emplace_back(std::make_unique<Array<uint8_t>>(context, bytes, 4 * k))->data());
  }
  Sum sum;
  sum.numel = c.numel;
  sum.own = {own.data(), c.dtype};
  sum.scale = c.received ? 0.25f : 1.0f;
  sum.received = pointers.data();
  sum.count = c.received;
  sum.own_position = c.received / 2;
  if (c.residual) {
    sum.feedback.residual = {residual.data()};
    sum.feedback.loss_scale = loss_scale.data();
  }
  sum.message = message.data();
  sum.decoded = {decoded.data(), c.dtype};
  sum.rounding = {c.stochastic, {uint64_t{1} << 40, 5, 2}, 1024};
  c.codec.encode_sum(context, sum);
  const Array<double> sum_squares(context, {-1.0});
  const Array<float> found_inf(context, {-1.0f});
  c.codec.decode(context, c.numel, message.data(), {values.data()}, {sum_squares.data(), found_inf.data()});
  return {message.values(), decoded.values(),        as_elements(residual.values(), Dtype::fp32),
          values.values(),  sum_squares.values()[0], found_inf.values()[0]};
}

bool same_bits(double a, double b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

class CodecOn : public OnEveryContext {
 protected:
  void expect_as_on_cpu(const Case& c) {
    SCOPED_TRACE(c.codec.name + " of " + std::to_string(c.numel));
    const Result here = run(context(), c), there = run(cpu_context(), c);
    EXPECT_EQ(here.message, there.message);
    EXPECT_EQ(here.decoded, there.decoded);
    EXPECT_EQ(here.residual, there.residual);
    EXPECT_EQ(here.values, there.values);
    EXPECT_TRUE(same_bits(here.sum_squares, there.sum_squares) || (std::isnan(here.sum_squares) && std::isnan(there.sum_squares)));
    EXPECT_EQ(here.found_inf, there.found_inf);
  }
};
DLT_ON_EVERY_CONTEXT(CodecOn);

TEST_P(CodecOn, GivesTheBytesOfTheCpu) {
  for (const Codec& codec : codecs()) {
    expect_as_on_cpu({codec, 1792 + 77});
    expect_as_on_cpu({codec, 1792, Dtype::fp32, 0, true, true});
  }
}

TEST_P(CodecOn, TakesAnyLength) {
  for (const Codec& codec : codecs()) {
    for (const int64_t numel : {0, 1, 2, 31, 33, 65, 127, 129, 255}) expect_as_on_cpu({codec, numel, Dtype::fp32, 1, numel % 2 == 0});
  }
}

TEST_P(CodecOn, TakesAnyTypeAndAlignment) {
  for (const Codec& codec : codecs()) {
    expect_as_on_cpu({codec, 600, Dtype::fp16, 2, true, false, true});
    expect_as_on_cpu({codec, 600, Dtype::bf16, 1, true, true, true});
    expect_as_on_cpu({codec, 600, Dtype::fp32, 0, false, false, true});
  }
}

TEST_P(CodecOn, SeesNonFiniteValues) {
  for (const Codec& codec : codecs()) {
    for (const bool finite : {true, false}) {
      std::vector<float> values(1000, 1.5f);
      if (!finite) values[999] = std::numeric_limits<float>::infinity();
      const Array<float> own(context(), values), out(context(), values), found_inf(context(), {-1.0f});
      const Array<uint8_t> message(context(), Bytes(codec.bytes(1000)));
      const Array<double> sum_squares(context(), {-1.0});
      Sum sum;
      sum.numel = 1000;
      sum.own = {own.data()};
      sum.message = message.data();
      codec.encode_sum(context(), sum);
      codec.decode(context(), 1000, message.data(), {out.data()}, {sum_squares.data(), found_inf.data()});
      EXPECT_EQ(found_inf.values()[0], finite ? 0.0f : 1.0f) << codec.name;
      EXPECT_EQ(std::isfinite(sum_squares.values()[0]), finite) << codec.name;
      EXPECT_EQ(std::isnan(out.values()[999]), !finite) << codec.name;
      EXPECT_EQ(out.values()[0], 1.5f) << codec.name;
    }
  }
}

TEST_P(CodecOn, AddsUpThousandsOfTiles) {
  const Codec& codec = find_codec("int4");
  constexpr int64_t numel = 256 * 128 * 2 + 5;  // three levels of sums
  const Array<uint8_t> message(context(), message_on_cpu(codec, std::vector<float>(numel, 7.0f)));
  const Array<float> out(context(), std::vector<float>(numel)), found_inf(context(), {-1.0f});
  const Array<double> sum_squares(context(), {-1.0});
  codec.decode(context(), numel, message.data(), {out.data()}, {sum_squares.data(), found_inf.data()});
  EXPECT_EQ(sum_squares.values()[0], 49.0 * numel);
  EXPECT_EQ(found_inf.values()[0], 0.0f);
}

TEST(Philox, GivesTheKnownAnswers) {
  // From the test vectors of Random123, the library of the paper (Salmon et al. 2011).
  const auto expect = [](math::Words counter, uint32_t key0, uint32_t key1, const std::vector<uint32_t>& answer,
                         const std::vector<uint32_t>& after_seven_rounds) {
    const math::Words words = math::philox<10>(counter, {key0, key1}), seven = math::philox<7>(counter, {key0, key1});
    EXPECT_EQ(std::vector<uint32_t>(words.word, words.word + 4), answer);
    EXPECT_EQ(std::vector<uint32_t>(seven.word, seven.word + 4), after_seven_rounds);
  };
  expect({{0, 0, 0, 0}}, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48});
  expect({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffff, 0xffffffff, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
         {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662});
  expect({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
         {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a});
}

TEST(Dtypes, HalvesRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half{static_cast<uint16_t>(bits)};
    const BFloat16 bf16{static_cast<uint16_t>(bits)};
    EXPECT_TRUE(std::isnan(widen(half)) || narrow<Half>(widen(half)).bits == bits) << bits;
    EXPECT_TRUE(std::isnan(widen(bf16)) || narrow<BFloat16>(widen(bf16)).bits == bits) << bits;
  }
  EXPECT_TRUE(std::isnan(widen(narrow<Half>(std::nanf("")))) && std::isnan(widen(narrow<BFloat16>(std::nanf("")))));
}

}  // namespace
}  // namespace dltrain
