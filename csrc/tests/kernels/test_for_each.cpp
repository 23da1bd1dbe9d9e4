#include "kernels/for_each.h"

#include <cmath>
#include <deque>
#include <limits>
#include <thread>

#include "kernels/codecs.h"
#include "kernels/message.h"
#include "kernels/operations.h"
#include "tests/contexts.h"

namespace dltrain {
namespace {

void two_threads(int64_t n, int64_t, const Range& body) {
  std::thread other([&] { body(0, n / 3); });
  body(n / 3, n);
  other.join();
}

float read(const TypedPointer& from, int64_t i) {
  float value = 0.0f;
  with_type(from, [&](const auto* values) { value = widen(values[i]); });
  return value;
}

void write(const TypedPointer& to, int64_t i, float value) {
  with_type(to, [&]<class T>(T* values) { values[i] = narrow<T>(value); });
}

// A list of tensors with K streams each, whose values do not depend on the context and the alignment, and copies if the signature has them.
template <int K, class Numbers = None>
struct Rows {
  Rows(const ExecutionContext& context, const std::vector<int64_t>& sizes, bool aligned = true, const Signature<K>& form = {})
      : counts(context, std::vector<float>(sizes.size(), 3.0f)), list(form) {
    for (size_t row = 0; row < sizes.size(); ++row) {
      std::array<void*, K> data;
      for (int k = 0; k < K; ++k) data[k] = add(context, form.formats[k].dtype, sizes[row], k, row, aligned);
      Numbers numbers;
      if constexpr (requires { numbers.counters().values[0]; }) {
        for (auto& counter : numbers.counters().values) counter = counts.data() + row;
      }
      list.add(data, sizes[row], numbers, form.copies ? add(context, form.copy, sizes[row], K, row, aligned) : nullptr);
    }
  }
  // Returns the values of each stream of each row, and of its copy.
  std::vector<std::vector<float>> values() const {
    std::vector<std::vector<float>> out;
    for (size_t i = 0; i < arrays.size(); ++i) {
      auto bytes = arrays[i].values();
      auto& numbers = out.emplace_back();
      for (int64_t k = 0; k < sizes[i]; ++k) numbers.push_back(read({bytes.data(), dtypes[i]}, k));
    }
    return out;
  }

  Array<float> counts;
  std::deque<Array<uint8_t>> arrays;
  std::vector<Dtype> dtypes;
  std::vector<int64_t> sizes;
  TensorList<K, Numbers> list;

 private:
  void* add(const ExecutionContext& context, Dtype dtype, int64_t size, int64_t k, size_t row, bool aligned) {
    const TypedPointer word{nullptr, dtype};
    std::vector<uint8_t> bytes(word.bytes(size));
    const float divisor = k < 3 ? 100 : 1000;  // a mean of gradients has a square below the mean of their squares
    for (int64_t i = 0; i < size; ++i) {
      write({bytes.data(), dtype}, i, static_cast<float>((i * 7 + k * 5 + static_cast<int64_t>(row)) % 97 + 1) / divisor);
    }
    dtypes.push_back(dtype);
    sizes.push_back(size);
    return arrays.emplace_back(context, bytes, aligned ? 0 : word.bytes((static_cast<int64_t>(row) + k) % 4)).data();
  }
};

template <class Operation>
using RowsOf = Rows<Operation::streams, typename Operation::Numbers>;

constexpr Dtype fp32 = Dtype::fp32, fp16 = Dtype::fp16, bf16 = Dtype::bf16;

// Returns all combinations of types of parameter and gradient, and of a copy of a master.
template <int K>
std::vector<Signature<K>> forms() {
  std::vector<Signature<K>> all;
  for (const Dtype first : {fp32, fp16, bf16}) {
    for (const Dtype second : {fp32, fp16, bf16}) {
      all.push_back({{first, second}});
      if (first != fp32) all.push_back({{fp32, second}, true, first});
    }
  }
  return all;
}

using AdamW = Update<math::AdamW, 0b011>;
using SGD = Update<math::SGD, 0b0>;
using Momentum = Update<math::SGD, 0b1>;

const AdamW adamw{{0.8, 0.95, 1e-6, 0.1}, {1e-2, false, {}}};
const SGD sgd{{0.0, 0.0, 0.1, false}, {0.1, true, {}}};
const Momentum momentum{{0.9, 0.0, 0.1, true}, {0.1, false, {}}};

// Calls visit(operation) for the step of every optimizer, with each choice of optional states.
template <class Visit>
void visit_updates(Visit&& visit) {
  const auto visit_one = [&]<class Operation>(std::type_identity<Operation>) {
    if constexpr (requires(Operation operation) { operation.step.lr; }) {
      Operation operation;
      operation.step.lr = 0.1;
      visit(operation);
    }
  };
  [&]<class... Operations>(std::type_identity<std::tuple<Operations...>>) {
    (visit_one(std::type_identity<Operations>()), ...);
  }(std::type_identity<Elementwise>());
}

TEST(ForEach, TheSameBitsForAnyNumberOfThreads) {
  const std::vector<int64_t> sizes = {1, 0, 7, 40000, 3, 64, 100001};
  const auto run = [&](const ExecutionContext& context) {
    RowsOf<AdamW> rows({}, sizes);
    for_each(context, rows.list, adamw);
    return rows.values();
  };
  EXPECT_EQ(run({serial_for}), run({two_threads}));
}

TEST(ForEach, TheSameBitsForEveryInstructionSet) {
  const auto run = [](const auto& operation, const auto& form, const cpu::InstructionSet& set) {
    using Operation = std::decay_t<decltype(operation)>;
    RowsOf<Operation> rows({}, {1, 7, 1001, 20003}, false, form);
    for (const auto& row : rows.list) {
      std::get<cpu::ElementLoop<Operation>>(set.loops->elements).run(operation.at(row.numbers), rows.list.signature(), row, 0, row.numel);
    }
    return rows.values();
  };
  const auto same = [&](const auto& operation) {
    const auto& sets = cpu::instruction_sets();
    for (const auto& form : forms<std::decay_t<decltype(operation)>::streams>()) {
      for (const auto& set : sets) EXPECT_EQ(run(operation, form, set), run(operation, form, sets.back())) << set.name;
    }
  };
  same(sgd);
  same(momentum);
  visit_updates(same);
}

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

TEST(ForEach, KeepsStatesInACodecsFormatOnEveryInstructionSet) {
  for (const auto& set : cpu::instruction_sets()) {
    check_coded_states({}, [&](const ListOf<AdamW>& list) {
      for (const auto& row : list) {
        std::get<cpu::ElementLoop<AdamW>>(set.loops->elements).run(adamw.at(row.numbers), list.signature(), row, 0, row.numel);
      }
    });
  }
}

TEST(ForEach, CutsCodedRowsBetweenThreads) {
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

TEST(ForEach, RefusesACodecWhereTheOperationTakesElements) {
  EXPECT_THROW(for_each({}, ListOf<AdamW>(Signature<4>{{fp32, softsign8}}), adamw), std::invalid_argument);
  EXPECT_THROW(for_each({}, ListOf<SGD>(Signature<2>{{root8}}), sgd), std::invalid_argument);
}

TEST(ForEach, KeepsEveryHalfOnEveryInstructionSet) {
  std::vector<uint16_t> all(65536 + 5), none(all.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const SGD still{{}, {0.0, false, {}}};
  for (const auto& set : cpu::instruction_sets()) {
    for (const Dtype dtype : {fp16, bf16}) {
      std::vector<uint16_t> values = all;
      ListOf<SGD> list(Signature<2>{{dtype, dtype}});
      list.add({values.data(), none.data()}, std::ssize(values));
      std::get<cpu::ElementLoop<SGD>>(set.loops->elements).run(still.at({}), list.signature(), list.row(0), 0, std::ssize(values));
      for (size_t i = 0; i < all.size(); ++i) {
        const auto expected = dtype == fp16 ? narrow<Half>(widen(Half{all[i]})).bits : narrow<BFloat16>(widen(BFloat16{all[i]})).bits;
        ASSERT_EQ(values[i], expected) << set.name << " " << i;
      }
    }
  }
}

class ForEachOn : public OnEveryContext {};
DLT_ON_EVERY_CONTEXT(ForEachOn);

TEST_P(ForEachOn, KeepsStatesInACodecsFormat) {
  check_coded_states(context(), [&](const ListOf<AdamW>& list) { for_each(context(), list, adamw); });
}

// Each element is updated exactly once, with all types, sizes and alignments; the gradient does not change.
TEST_P(ForEachOn, EqualsTheArithmeticOfOneElement) {
  const std::vector<int64_t> sizes = {1, 0, 7, 8192, 8193, 3, 64, 0, 10001, 4, 0};
  const auto check = [&](const auto& operation, const auto& form, bool aligned) {
    using Operation = std::decay_t<decltype(operation)>;
    constexpr int K = Operation::streams;
    const RowsOf<Operation> rows(context(), sizes, aligned, form);
    auto expected = rows.values();
    for_each(context(), rows.list, operation);
    const RowsOf<Operation> on_the_host({}, {1});  // its counters are equal
    const auto element = operation.at(on_the_host.list.row(0).numbers);
    const size_t streams = form.copies ? K + 1 : K;
    for (size_t row = 0; row < sizes.size(); ++row) {
      for (int64_t i = 0; i < sizes[row]; ++i) {
        auto* const values = &expected[row * streams];
        [&]<std::size_t... I>(std::index_sequence<I...>) { apply(element, i, values[I][i]...); }(std::make_index_sequence<K>{});
        if (form.copies) values[K][i] = values[0][i];
      }
    }
    const auto got = rows.values();
    for (size_t stream = 0; stream < expected.size(); ++stream) {
      // The constants of an element use pow, which devices round differently.
      const Dtype dtype = rows.dtypes[stream];
      const float bound = dtype == fp32 ? 1e-6f : dtype == fp16 ? 0x1p-10f : 0x1p-7f;
      for (size_t i = 0; i < expected[stream].size(); ++i) {
        ASSERT_NEAR(got[stream][i], expected[stream][i], bound)
            << "row " << stream / streams << " stream " << stream % streams << " i=" << i;
      }
    }
  };
  const auto check_all = [&](const auto& operation) {
    for (const auto& form : forms<std::decay_t<decltype(operation)>::streams>()) {
      for (const bool aligned : {true, false}) check(operation, form, aligned);
    }
  };
  check_all(adamw);
  check_all(sgd);
  check(momentum, Signature<3>{}, true);
  visit_updates([&](const auto& operation) { check(operation, Signature<std::decay_t<decltype(operation)>::streams>{}, true); });
}

TEST_P(ForEachOn, TakesMoreRowsThanOneLaunch) {
  const Rows<1> rows(context(), std::vector<int64_t>(900, 1));
  auto expected = rows.values();
  for (auto& values : expected) values[0] += 1.0f;
  for_each(context(), rows.list, Advance<math::AdamW>{});
  EXPECT_EQ(rows.values(), expected);
}

TEST_P(ForEachOn, ReadsItsScalarsOnTheDevice) {
  const Array<float> lr(context(), {0.25f}), found_inf(context(), {2.0f}), none(context(), {0.0f});
  const Array<double> grad_scale(context(), {8.0});
  SGD sgd{{}, {1.0, true, {lr.data(), grad_scale.data(), nullptr}}};
  const Array<float> p(context(), {1.0f}), g(context(), {16.0f});
  ListOf<SGD> list;
  list.add({p.data(), g.data()}, 1);
  for_each(context(), list, sgd);
  EXPECT_EQ(p.values()[0], 1.5f);  // 1 + 0.25 * 16 / 8
  sgd.step.scalars.found_inf = found_inf.data();
  for_each(context(), list, sgd);
  EXPECT_EQ(p.values()[0], 1.5f);
  sgd.step.scalars.found_inf = none.data();
  for_each(context(), list, sgd);
  EXPECT_EQ(p.values()[0], 2.0f);
}

TEST_P(ForEachOn, WritesTheCopyAsTheMasterRounded) {
  const RowsOf<SGD> rows(context(), {5000}, false, {{fp32, fp16}, true, bf16});
  for_each(context(), rows.list, SGD{{}, {0.3, false, {}}});
  const auto values = rows.values();
  for (size_t i = 0; i < values[0].size(); ++i) ASSERT_EQ(values[2][i], widen(narrow<BFloat16>(values[0][i])));
}

TEST_P(ForEachOn, DrawsNoiseByTheIndexInTheWholeTensor) {
  using SGLD = Update<math::SGLD, 0b0>;
  const SGLD sgld{{}, {0.1, false, {}}};
  const RowsOf<SGLD> whole(context(), {10001}), cut(context(), {10001});
  const auto& row = cut.list.row(0);
  ListOf<SGLD> parts;
  auto numbers = row.numbers;
  for (const int64_t size : {1, 3, 509, 8192, 1296}) {
    parts.add({static_cast<float*>(row.data[0]) + numbers.first, static_cast<float*>(row.data[1]) + numbers.first}, size, numbers);
    numbers.first += size;
  }
  for_each(context(), whole.list, sgld);
  for_each(context(), parts, sgld);
  EXPECT_EQ(cut.values(), whole.values());
}

TEST_P(ForEachOn, AdaptsEachTensorByItsOwnSums) {
  const Array<float> p(context(), {3.0f, 4.0f, 1.0f}), g(context(), {0.6f, 0.8f, 0.5f});
  const Array<double> sums(context(), {25.0, 1.0});
  using LARS = Update<math::LARS, 0b0>;
  ListOf<LARS> adapted, excluded;
  adapted.add({p.data(), g.data()}, 2, {{}, {sums.data()}, {}});
  excluded.add({p.data() + 2, g.data() + 2}, 1);
  math::LARS rule;
  rule.trust_coefficient = 0.1;
  for_each(context(), adapted, LARS{rule, {2.0, false, {}}, true});
  for_each(context(), excluded, LARS{rule, {2.0, false, {}}, false});
  EXPECT_EQ(p.values(), (std::vector<float>{3.0f - 0.6f, 4.0f - 0.8f, 1.0f - 2.0f * 0.5f}));  // the ratio is 0.1 * 5 / 1
}

TEST(TensorList, ExtendsARowIfMemoryIsContiguous) {
  Half numbers[9];
  TensorList<1> list(Signature<1>{{Dtype::fp16}}), more(Signature<1>{{Dtype::fp16}});
  list.extend({numbers}, 1);
  list.extend({numbers + 1}, 2);
  list.extend({numbers + 4}, 3);
  more.extend({numbers + 7}, 2);
  list.append(more);
  ASSERT_EQ(list.size(), 3);
  EXPECT_EQ(list.numel(), 8);
  std::vector<int64_t> stretches;
  list.visit(0, 8, [&](int64_t row, const auto&, int64_t first, int64_t last) { stretches.insert(stretches.end(), {row, first, last}); });
  EXPECT_EQ(stretches, (std::vector<int64_t>{0, 0, 3, 1, 0, 3, 2, 0, 2}));
}

TEST(TensorList, CutsRowsAfterWholeUnits) {
  TensorList<1> list;
  for (const int64_t numel : {3, 1500, 0, 1024, 700}) list.add({nullptr}, numel);
  for (const std::vector<int64_t>& borders :
       {std::vector<int64_t>{0, 1, 2, 600, 1503, 1504, 2600, 3227}, {0, 3227}, {0, 515, 516, 3226, 3227}}) {
    std::vector<int64_t> seen(list.size());
    for (size_t i = 1; i < borders.size(); ++i) {
      list.visit(borders[i - 1], borders[i], [&](int64_t row, const auto&, int64_t first, int64_t last) {
        EXPECT_EQ(first, seen[row]);
        EXPECT_EQ(first % row_unit, 0);
        seen[row] = last;
      });
    }
    EXPECT_EQ(seen, (std::vector<int64_t>{3, 1500, 0, 1024, 700}));
  }
}

TEST_P(ForEachOn, TakesEmptyLists) {
  for_each(context(), TensorList<1>{}, Advance<math::AdamW>{});
  const Rows<1> rows(context(), {0, 0});
  for_each(context(), rows.list, Advance<math::AdamW>{});
}

}  // namespace
}  // namespace dltrain
