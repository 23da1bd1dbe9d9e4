#include "kernels/for_each.h"

#include "kernels/operations.h"
#include "tests/kernels/rows.h"

namespace dltrain {
namespace {

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
      std::get<cpu::ElementLoop<Operation>>(set.loops->elements)
          .run(operation.at(row.numbers), rows.list.signature(), row, 0, row.numel, {});
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

TEST(ForEach, KeepsEveryHalfOnEveryInstructionSet) {
  std::vector<uint16_t> all(65536 + 5), none(all.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const SGD still{{}, {0.0, false, {}}};
  for (const auto& set : cpu::instruction_sets()) {
    for (const Dtype dtype : {fp16, bf16}) {
      std::vector<uint16_t> values = all;
      ListOf<SGD> list(Signature<2>{{dtype, dtype}});
      list.add({values.data(), none.data()}, std::ssize(values));
      std::get<cpu::ElementLoop<SGD>>(set.loops->elements).run(still.at({}), list.signature(), list.row(0), 0, std::ssize(values), {});
      for (size_t i = 0; i < all.size(); ++i) {
        const auto expected = dtype == fp16 ? narrow<Half>(widen(Half{all[i]})).bits : narrow<BFloat16>(widen(BFloat16{all[i]})).bits;
        ASSERT_EQ(values[i], expected) << set.name << " " << i;
      }
    }
  }
}

class ForEachOn : public OnEveryContext {};
DLT_ON_EVERY_CONTEXT(ForEachOn);

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
