// Streams in a compact format: states as codes, and bf16 parameters that are rounded stochastically or extended.

#include <cmath>
#include <limits>

#include "kernels/codecs.h"
#include "kernels/for_each.h"
#include "kernels/message.h"
#include "kernels/operations.h"
#include "kernels/reduce.h"
#include "math/narrowing.h"
#include "tests/kernels/rows.h"

namespace dltrain {
namespace {

using AdamW = Update<math::AdamW, 0b011>;
using SGD = Update<math::SGD, 0b0>;
using Momentum = Update<math::SGD, 0b1>;
using LARS = Update<math::LARS, 0b0>;
using LAMB = Update<math::LAMB, 0b11>;

const AdamW adamw{{0.8, 0.95, 1e-6, 0.1}, {1e-2, false, {}, 7}};
constexpr Format stochastic(bf16, Narrowing::stochastic), extended(bf16, Narrowing::extended);

constexpr Format softsign8 = format_of<math::Softsign8>(), root8 = format_of<math::Root8>();
constexpr auto code_bytes = MessageLayout<math::Root8>::bytes;

// One of `to` and `from` is a message.
void copy(const ExecutionContext& context, void* to, Format format, const void* from, Format from_format, int64_t numel) {
  ListOf<Copy> list(Signature<2>{{format, from_format}});
  list.add({to, const_cast<void*>(from)}, numel);
  for_each(context, list, Copy{});
}

std::vector<uint8_t> encoded(std::vector<float> values, const Format& format) {
  std::vector<uint8_t> message(code_bytes(std::ssize(values)));
  copy({}, message.data(), format, values.data(), fp32, std::ssize(values));
  return message;
}

std::vector<float> decoded(const std::vector<uint8_t>& message, const Format& format, size_t numel) {
  std::vector<float> values(numel);
  copy({}, values.data(), fp32, message.data(), format, std::ssize(values));
  return values;
}

std::vector<float> recoded(const std::vector<float>& values, const Format& format) {
  return decoded(encoded(values, format), format, values.size());
}

// The moments of AdamW as messages have the bits of decoding, a step in fp32, and encoding the result.
template <class Run>
void check_coded_states(const ExecutionContext& context, Run&& run) {
  const std::vector<int64_t> sizes = {1, 0, 7, 8192, 127, 128, 20003, 3};
  const auto format_of_stream = [](int k) { return k == 2 ? softsign8 : root8; };
  const RowsOf<AdamW> rows(context, sizes), on_the_host({}, sizes);
  std::deque<Array<uint8_t>> messages;
  ListOf<AdamW> list(Signature<4>{{fp32, fp32, softsign8, root8}});
  for (const auto& row : rows.list) {
    auto data = row.data;
    for (int k : {2, 3}) {
      messages.emplace_back(context, std::vector<uint8_t>(code_bytes(row.numel)));
      copy(context, messages.back().data(), format_of_stream(k), data[k], fp32, row.numel);
      data[k] = messages.back().data();
    }
    list.add(data, row.numel, row.numbers);
  }
  run(list);

  const auto values_of = [&](const auto& row, int k) {
    const auto* const first = static_cast<const float*>(row.data[k]);
    return std::vector<float>(first, first + row.numel);
  };
  for (const auto& row : on_the_host.list) {
    for (int k : {2, 3}) {
      const auto values = recoded(values_of(row, k), format_of_stream(k));
      std::copy(values.begin(), values.end(), static_cast<float*>(row.data[k]));
    }
  }
  for_each({}, on_the_host.list, adamw);
  for (int64_t i = 0; i < list.size(); ++i) {
    const auto& row = on_the_host.list.row(i);
    for (int k : {2, 3}) {
      EXPECT_EQ(messages[2 * i + k - 2].values(), encoded(values_of(row, k), format_of_stream(k))) << "row " << i << " stream " << k;
    }
    const auto expected = on_the_host.values()[4 * i], got = rows.values()[4 * i];
    for (size_t j = 0; j < expected.size(); ++j) ASSERT_NEAR(got[j], expected[j], 1e-6f) << "row " << i << " j=" << j;
  }
}

TEST(Compact, KeepsStatesInACodecsFormatOnEveryInstructionSet) {
  for (const auto& set : cpu::instruction_sets()) {
    check_coded_states({}, [&](const ListOf<AdamW>& list) {
      for (const auto& row : list) {
        std::get<cpu::ElementLoop<AdamW>>(set.loops->elements).run(adamw.at(row.numbers), list.signature(), row, 0, row.numel, {});
      }
    });
  }
}

TEST(Compact, CutsCodedRowsBetweenThreads) {
  check_coded_states({}, [](const ListOf<AdamW>& list) { for_each({two_threads}, list, adamw); });
}

TEST(Softsign8, ErrsByAtMostTwoStepsAtTheEndsAndHalfAStepNearZero) {
  std::vector<float> values;
  for (int i = -1000; i <= 1000; ++i) values.push_back(static_cast<float>(i) * 0.003f);
  const auto got = recoded(values, softsign8);
  for (size_t first = 0; first < values.size(); first += 128) {
    float largest = 0.0f;
    const size_t last = std::min(first + 128, values.size());
    for (size_t i = first; i < last; ++i) largest = std::max(largest, std::abs(values[i]));
    for (size_t i = first; i < last; ++i) {
      const float y = std::abs(values[i]) / largest;
      EXPECT_NEAR(got[i], values[i], largest * (1 + y) * (1 + y) / 4 / 127 * 1.01f) << i;
    }
  }
}

TEST(Root8, NeverDecodesAPositiveNumberAsZero) {
  std::vector<float> values(256);
  for (int i = 0; i < 256; ++i) values[i] = std::ldexp(1.0f, -i / 2);
  values[7] = 0.0f;
  values[255] = 0.0f;
  const auto got = recoded(values, root8);
  for (size_t i = 0; i < values.size(); ++i) {
    const float largest = i < 128 ? 1.0f : values[128];
    EXPECT_EQ(got[i] == 0.0f, values[i] == 0.0f) << i;
    EXPECT_NEAR(got[i], values[i], largest / 255 * 1.01f) << i;
  }
}

TEST(StateCodecs, GiveTheSameCodesAfterDecoding) {
  const RowsOf<Momentum> rows({}, {5000});
  const auto values = rows.values()[1];
  for (const Format& format : {softsign8, root8}) {
    const auto message = encoded(values, format);
    EXPECT_EQ(encoded(decoded(message, format, values.size()), format), message);
  }
}

TEST(StateCodecs, KeepZerosAndMakeABlockNaNThatHasOne) {
  for (const Format& format : {softsign8, root8}) {
    EXPECT_EQ(encoded(std::vector<float>(300), format), std::vector<uint8_t>(code_bytes(300)));
    std::vector<float> values(256, 1.0f);
    values[200] = std::numeric_limits<float>::infinity();
    const auto got = recoded(values, format);
    EXPECT_EQ(got[127], 1.0f);
    EXPECT_TRUE(std::isnan(got[128]) && std::isnan(got[200]));
  }
}

TEST(Compact, IsRefusedWhereTheOperationTakesElements) {
  EXPECT_THROW(for_each({}, ListOf<AdamW>(Signature<4>{{fp32, softsign8}}), adamw), std::invalid_argument);
  EXPECT_THROW(for_each({}, ListOf<SGD>(Signature<2>{{fp32, root8}}), SGD{}), std::invalid_argument);
  EXPECT_THROW(for_each({}, ListOf<SGD>(Signature<2>{{fp32, extended}}), SGD{}), std::invalid_argument);
  EXPECT_THROW(for_each({}, ListOf<LARS>(Signature<2>{{stochastic}}), LARS{}), std::invalid_argument);
}

// The numbers near a bfloat16 and between it and the next one, and special ones.
std::vector<float> numbers_to_narrow() {
  std::vector<float> numbers = {0.0f, -0.0f, 1e-45f, -1e-40f, std::numeric_limits<float>::infinity()};
  for (const uint32_t start : {0x3f800000u, 0xc1234000u, 0x00010000u, 0x7f7d0000u}) {
    for (uint32_t low = 0; low < 0x20000; low += 37) numbers.push_back(float_of(start + low));
  }
  return numbers;
}

TEST(Extended, HasTheFirst24BitsOfANumberAndItsNearestBFloat16) {
  for (const float x : numbers_to_narrow()) {
    const math::Extended got = math::extended(x);
    const uint32_t expected = (bits_of(x) + 0x7f + (bits_of(x) >> 8 & 1)) & ~0xffu;
    EXPECT_EQ(bits_of(math::widen(got)), expected) << x;
    const auto distance = static_cast<int32_t>((static_cast<uint32_t>(got.element.bits) << 16) - expected);
    EXPECT_LE(distance, 0x8000) << x;
    EXPECT_GE(distance, -0x7f00) << x;
  }
  EXPECT_TRUE(std::isnan(math::widen(math::extended(std::nanf("")))));
  EXPECT_TRUE(std::isinf(math::widen(math::extended(0x1.fffffep127f))));  // as if rounded to nearest
}

TEST(Extended, ElementsThatOthersWriteKeepTheirValue) {
  for (const uint8_t rest : {0x00, 0x01, 0x7f, 0x80, 0xff}) {
    EXPECT_NEAR(math::widen({narrow<BFloat16>(1.0f), rest}), 1.0f, 0x1p-8f);
    EXPECT_LT(std::abs(math::widen({narrow<BFloat16>(0.0f), rest})), 1e-38f);
    EXPECT_TRUE(std::isinf(math::widen({narrow<BFloat16>(std::numeric_limits<float>::infinity()), rest})));
  }
}

TEST(Extended, ExtendsAGivenElementAsFarAsItReaches) {
  for (const float x : numbers_to_narrow()) {
    for (const float element : {widen(narrow<BFloat16>(x)), widen(math::extended(x).element)}) {
      const math::Extended got = math::extended(math::extending(element, x));
      EXPECT_EQ(bits_of(widen(got.element)), bits_of(element)) << x;
      const auto error = static_cast<int32_t>(bits_of(math::widen(got)) - bits_of(x));
      EXPECT_LE(std::abs(error), 0x180) << x;
    }
  }
}

TEST(Stochastic, TakesEachNeighbourInProportion) {
  for (const uint32_t start : {0x3f800000u, 0xc1230000u}) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0xffffu}) {
      uint32_t away = 0;
      for (uint32_t random = 0; random < 0x10000; ++random) {
        const uint32_t got = math::stochastic_bfloat16(float_of(start + low), random).bits;
        ASSERT_TRUE(got == start >> 16 || got == (start >> 16) + 1);
        away += got != start >> 16;
      }
      EXPECT_EQ(away, low);
    }
  }
  EXPECT_EQ(math::stochastic_bfloat16(std::numeric_limits<float>::infinity(), 0xffff).bits, 0x7f80);
  EXPECT_TRUE(std::isnan(widen(math::stochastic_bfloat16(float_of(0x7f800001), 0xffff))));
}

// What becomes of the first stream, which was bf16: the elements and, if they are extended, the rest.
std::vector<float> narrowed(const std::vector<float>& values, Narrowing how, const math::RandomStream& random, int64_t first) {
  std::vector<float> out;
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t index = first + static_cast<int64_t>(i);
    const uint32_t half = math::half_for(index, math::words_for(random, index).word[index % 4]);
    out.push_back(how == Narrowing::extended ? math::widen(math::extended(values[i])) : widen(math::stochastic_bfloat16(values[i], half)));
  }
  return out;
}

// A step of AdamW on bf16 parameters has the bits of a step in fp32 whose parameters are then narrowed.
template <class Run>
void check_parameters(const ExecutionContext& context, Narrowing how, Run&& run) {
  const std::vector<int64_t> sizes = {1, 0, 7, 8192, 127, 513, 20003, 3};
  const RowsOf<AdamW> rows(context, sizes, true, {{Format(bf16, how)}}), on_the_host({}, sizes, true, {{bf16}}), plain({}, sizes);
  const Array<int64_t> steps(context, {41});
  AdamW operation = adamw;
  operation.step.scalars.steps = steps.data();
  std::deque<Array<uint8_t>> rests;
  ListOf<AdamW> list(rows.list.signature());
  for (int64_t i = 0; i < rows.list.size(); ++i) {
    const auto& row = rows.list.row(i);
    auto numbers = row.numbers;
    numbers.first = 3 * i;
    numbers.number = static_cast<uint32_t>(i);
    rests.emplace_back(context, std::vector<uint8_t>(row.numel));
    list.add(row.data, row.numel, numbers, rests.back().data());
    auto* const p = static_cast<float*>(plain.list.row(i).data[0]);
    for (int64_t j = 0; j < row.numel; ++j) p[j] = read({on_the_host.list.row(i).data[0], bf16}, j);
  }
  run(list, operation);
  for_each({}, plain.list, adamw);
  const auto got = rows.values(), expected = plain.values();
  for (int64_t i = 0; i < list.size(); ++i) {
    const auto values = narrowed(expected[4 * i], how, {7, 41, math::of_parameters | static_cast<uint32_t>(i)}, 3 * i);
    const auto rest = rests[i].values();
    for (size_t j = 0; j < values.size(); ++j) {
      const float value = how == Narrowing::extended ? math::widen({narrow<BFloat16>(got[4 * i][j]), rest[j]}) : got[4 * i][j];
      // Devices round the constants of a step differently.
      if (context.on_cuda())
        ASSERT_NEAR(value, values[j], std::abs(values[j]) * 0x1p-7f) << "row " << i << " j=" << j;
      else
        ASSERT_EQ(value, values[j]) << "row " << i << " j=" << j;
    }
    EXPECT_EQ(got[4 * i + 1], expected[4 * i + 1]);
  }
}

TEST(Compact, ParametersAreNarrowedAlikeOnEveryInstructionSet) {
  for (const Narrowing how : {Narrowing::stochastic, Narrowing::extended}) {
    for (const auto& set : cpu::instruction_sets()) {
      check_parameters({}, how, [&](const ListOf<AdamW>& list, const AdamW& operation) {
        const auto loop = std::get<cpu::ElementLoop<AdamW>>(set.loops->elements);
        for (const auto& row : list) {
          loop.run(operation.at(row.numbers), list.signature(), row, 0, row.numel, operation.random(row.numbers));
        }
      });
    }
    check_parameters({two_threads}, how, [](const auto& list, const AdamW& operation) { for_each({two_threads}, list, operation); });
  }
}

class CompactOn : public OnEveryContext {};
DLT_ON_EVERY_CONTEXT(CompactOn);

TEST_P(CompactOn, ParametersAreNarrowed) {
  for (const Narrowing how : {Narrowing::stochastic, Narrowing::extended}) {
    check_parameters(context(), how, [&](const auto& list, const AdamW& operation) { for_each(context(), list, operation); });
  }
}

TEST_P(CompactOn, RoundsByTheIndexInTheWholeTensor) {
  const SGD still{{}, {0.3, false, {}, 5}};
  const RowsOf<SGD> whole(context(), {10001}, true, {{stochastic}}), cut(context(), {10001}, true, {{stochastic}});
  const auto& row = cut.list.row(0);
  ListOf<SGD> parts(row.data[0] ? cut.list.signature() : Signature<2>{});
  auto numbers = row.numbers;
  for (const int64_t size : {1, 3, 7, 2, 509, 8192, 1287}) {
    parts.add({static_cast<BFloat16*>(row.data[0]) + numbers.first, static_cast<float*>(row.data[1]) + numbers.first}, size, numbers);
    numbers.first += size;
  }
  for_each(context(), whole.list, still);
  for_each(context(), parts, still);
  EXPECT_EQ(cut.values(), whole.values());
}

TEST_P(CompactOn, NormsAreThoseOfTheDecodedStreams) {
  const std::vector<int64_t> sizes = {1, 7, 8192, 20003};
  const RowsOf<LAMB> rows(context(), sizes, true, {{bf16}}), plain(context(), sizes);
  const Array<double> sums(context(), std::vector<double>(4 * sizes.size()));
  std::deque<Array<uint8_t>> bytes;
  ListOf<LAMB> compact(Signature<4>{{extended, fp32, softsign8, root8}}), wide = plain.list;
  for (int64_t i = 0; i < compact.streams; ++i) {
    auto row = rows.list.row(i);
    const auto& to = wide.row(i);
    std::vector<uint8_t> rest(row.numel);
    for (int64_t j = 0; j < row.numel; ++j) rest[j] = static_cast<uint8_t>(j * 31);
    const auto& beside = bytes.emplace_back(context(), rest);
    ListOf<Copy> list(Signature<2>{{fp32, extended}});
    list.add({to.data[0], row.data[0]}, row.numel, {}, beside.data());
    for_each(context(), list, Copy{});
    for (int k : {2, 3}) {
      const Format format = compact.signature().formats[k];
      const auto& codes = bytes.emplace_back(context(), std::vector<uint8_t>(code_bytes(row.numel)));
      copy(context(), codes.data(), format, row.data[k], fp32, row.numel);
      copy(context(), to.data[k], fp32, codes.data(), format, row.numel);
      row.data[k] = codes.data();
    }
    row.numbers.sums = sums.data() + 4 * i;
    wide.row(i).numbers.sums = sums.data() + 4 * i + 2;
    compact.add(row.data, row.numel, row.numbers, beside.data());
  }
  const Norms<math::LAMB, 0b11> norms{{}, {0.1, false, {}}};
  reduce(context(), compact, norms);
  reduce(context(), wide, norms);
  const auto got = sums.values();
  for (size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_GT(got[4 * i], 0.0);
    EXPECT_EQ(got[4 * i], got[4 * i + 2]);
    EXPECT_EQ(got[4 * i + 1], got[4 * i + 3]);
  }
}

TEST_P(CompactOn, KeepsStatesInACodecsFormat) {
  check_coded_states(context(), [&](const ListOf<AdamW>& list) { for_each(context(), list, adamw); });
}

}  // namespace
}  // namespace dltrain
