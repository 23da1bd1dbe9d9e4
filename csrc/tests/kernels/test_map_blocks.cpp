#include "kernels/map_blocks.h"

#include "kernels/reduce.h"
#include "kernels/statistics.h"
#include "tests/contexts.h"

namespace dltrain {
namespace {

class FoldOn : public OnEveryContext {
 protected:
  // own <- the sum in order, with own at own_position.
  std::vector<float> fold(const std::vector<float>& own, const std::vector<std::vector<float>>& received, int own_position, float scale) {
    const Array<float> at(context(), own);
    std::vector<std::unique_ptr<Array<float>>> arrays;
    std::vector<const uint8_t*> pointers;
    for (const auto& values : received) {
      pointers.push_back(
          reinterpret_cast<const uint8_t*>(arrays.emplace_back(std::make_unique<Array<float>>(context(), values, 1))->data()));
    }
    Sum sum;
    sum.numel = static_cast<int64_t>(own.size());
    sum.own = sum.decoded = {at.data()};
    sum.scale = scale;
    sum.received = pointers.data();
    sum.count = static_cast<int>(pointers.size());
    sum.own_position = own_position;
    map_blocks(context(), sum.numel, EncodeSum<math::Raw>{sum});
    return at.values();
  }
};
DLT_ON_EVERY_CONTEXT(FoldOn);

TEST_P(FoldOn, AddsInTheOrderGiven) {
  // 1e8 + -1e8 + 1 is 1 in this order and 0 in another.
  const std::vector<float> first(5000, 1e8f), last(5000, 1.0f);
  EXPECT_EQ(fold(std::vector<float>(5000, -1e8f), {first, last}, 1, 1.0f), last);
  EXPECT_EQ(fold(std::vector<float>(5000, 2.0f), {first, first}, 2, 0.5f), std::vector<float>(5000, 2e8f + 1.0f));
}

TEST_P(FoldOn, ScalesOnlyOwn) {
  EXPECT_EQ(fold(std::vector<float>(3000, 3.0f), {std::vector<float>(3000, 5.0f)}, 0, 0.5f), std::vector<float>(3000, 6.5f));
  EXPECT_EQ(fold(std::vector<float>(3000, 3.0f), {}, 0, 2.0f), std::vector<float>(3000, 6.0f));
}

TEST_P(FoldOn, TakesAnyLengthAndManyOperands) {
  for (const int64_t numel : {0, 1, 3, 255, 257, 1024, 2047, 2049, 10001}) {
    std::vector<float> own, other, expected;
    for (int64_t i = 0; i < numel; ++i) {
      own.push_back(static_cast<float>(i));
      other.push_back(static_cast<float>(i % 13));
      expected.push_back(own.back() + 20 * other.back());
    }
    EXPECT_EQ(fold(own, std::vector<std::vector<float>>(20, other), 7, 1.0f), expected) << numel;
  }
}

class ReduceOn : public OnEveryContext {};
DLT_ON_EVERY_CONTEXT(ReduceOn);

TEST_P(ReduceOn, SumsSquaresRowByRow) {
  const std::vector<int64_t> sizes = {0, 1, 33, 8192, 0, 8193, 50001};
  std::vector<std::unique_ptr<Array<float>>> arrays;
  TensorList<1> list;
  std::vector<double> expected;
  for (const int64_t size : sizes) {
    std::vector<float> values;
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) {
      values.push_back(static_cast<float>(i % 31 - 15));
      sum += values.back() * values.back();
    }
    expected.push_back(sum);
    list.add({arrays.emplace_back(std::make_unique<Array<float>>(context(), values, 1))->data()}, size);
  }
  const Array<double> results(context(), std::vector<double>(sizes.size(), -1.0));
  reduce(context(), list, Squares{results.data()});
  EXPECT_EQ(results.values(), expected);  // integers: exact in any order
}

TEST_P(ReduceOn, IsFiniteExactlyIfAllElementsAre) {
  const float large = std::numeric_limits<float>::max(), inf = std::numeric_limits<float>::infinity();
  for (const float last : {large, inf, -inf, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> values(20000, large);
    values.back() = last;
    const Array<float> array(context(), values);
    TensorList<1> list;
    list.add({array.data()}, 20000);
    const Array<double> results(context(), {0.0});
    reduce(context(), list, Squares{results.data()});
    EXPECT_EQ(std::isfinite(results.values()[0]), last == large);
  }
}

TEST_P(ReduceOn, SumsSquaresOfListsOfAnyType) {
  const std::vector<float> values(700, 3.0f);
  std::vector<Half> halves(20001, narrow<Half>(2.0f));
  const Array<float> wide(context(), values);
  const Array<Half> narrow_ones(context(), halves);
  TensorList<1> each, whole(Signature<1>{{Dtype::fp16}});
  for (int64_t row = 0; row < 700; ++row) each.add({wide.data() + row}, 1);
  whole.add({narrow_ones.data() + 1}, 20000);
  const Array<double> sum(context(), {-1.0});
  const Array<float> found_inf(context(), {-1.0f});
  sum_squares(context(), {each, whole, TensorList<1>()}, {sum.data(), found_inf.data()});
  EXPECT_EQ(sum.values()[0], 700 * 9.0 + 20000 * 4.0);
  EXPECT_EQ(found_inf.values()[0], 0.0f);
  sum_squares(context(), {}, {sum.data(), nullptr});
  EXPECT_EQ(sum.values()[0], 0.0);
}

TEST(Reduce, RefusesACodecsFormat) {
  double sum = 0;
  EXPECT_THROW(reduce({}, TensorList<1>(Signature<1>{{format_of<math::Root8>()}}), Squares{&sum}), std::invalid_argument);
}

// Sums two streams of any types in one pass; a third stream is not requested.
TEST_P(ReduceOn, TakesTheNormsOfAnUpdate) {
  using LARSNorms = Norms<math::LARS, 1>;
  for (const Dtype dtype : {Dtype::fp32, Dtype::fp16}) {
    Signature<3> form;
    form.formats[1] = dtype;
    ListOf<LARSNorms> list(form);
    std::vector<std::unique_ptr<Array<float>>> arrays;
    std::vector<std::unique_ptr<Array<Half>>> halves;
    std::vector<double> expected;
    for (const int64_t size : {7, 0, 8192, 20001}) {
      std::vector<float> params, grads;
      std::vector<Half> half_grads;
      double sums[2] = {};
      for (int64_t i = 0; i < size; ++i) {
        params.push_back(static_cast<float>(i % 31 - 15));
        half_grads.push_back(narrow<Half>(grads.emplace_back(static_cast<float>(i % 7 - 3))));
        sums[0] += params.back() * params.back();
        sums[1] += grads.back() * grads.back();
      }
      expected.insert(expected.end(), sums, sums + 2);
      void* const param = arrays.emplace_back(std::make_unique<Array<float>>(context(), params, 1))->data();
      void* const buffer = arrays.emplace_back(std::make_unique<Array<float>>(context(), std::vector<float>(size, 1e30f)))->data();
      void* grad = arrays.emplace_back(std::make_unique<Array<float>>(context(), grads, 1))->data();
      if (dtype == Dtype::fp16) grad = halves.emplace_back(std::make_unique<Array<Half>>(context(), half_grads, 1))->data();
      list.add({param, grad, buffer}, size);
    }
    const Array<double> results(context(), std::vector<double>(expected.size(), -1.0));
    for (int64_t row = 0; row < list.size(); ++row) list.row(row).numbers.sums = results.data() + 2 * row;
    reduce(context(), list, LARSNorms{});
    EXPECT_EQ(results.values(), expected);
  }
}

// The first step of LAMB: its direction is 1 where the gradient is positive. The step itself counts.
TEST_P(ReduceOn, TakesTheNormsOfAnUpdateThatIsNotYetCounted) {
  using LAMBNorms = Norms<math::LAMB, 0b11>;
  const Array<float> p(context(), {3.0f, 4.0f}), g(context(), {2.0f, 0.5f}), m(context(), {0.0f, 0.0f}), v(context(), {0.0f, 0.0f});
  const Array<float> step(context(), {0.0f});
  const Array<double> sums(context(), {-1.0, -1.0});
  ListOf<LAMBNorms> list;
  list.add({p.data(), g.data(), m.data(), v.data()}, 2, {{{step.data()}}, {sums.data()}, {}});
  math::LAMB rule;
  rule.weight_decay = 0.0;
  reduce(context(), list, LAMBNorms{rule, {}});
  EXPECT_EQ(sums.values()[0], 25.0);
  EXPECT_NEAR(sums.values()[1], 2.0, 1e-4);
  EXPECT_EQ(step.values(), std::vector<float>{0.0f});
  EXPECT_EQ(m.values(), (std::vector<float>{0.0f, 0.0f}));
}

TEST_P(ReduceOn, TakesMoreRowsThanOneLaunch) {
  const Array<float> values(context(), std::vector<float>(1100, 3.0f));
  TensorList<1> list;
  for (int64_t row = 0; row < 1100; ++row) list.add({values.data() + row}, 1);
  const Array<double> results(context(), std::vector<double>(1100));
  reduce(context(), list, Squares{results.data()});
  EXPECT_EQ(results.values(), std::vector<double>(1100, 9.0));
}

TEST(Loops, GiveTheSameBitsOnEveryInstructionSet) {
  std::vector<float> values, own;
  for (int i = 0; i < 10007; ++i) values.push_back(1.0f / static_cast<float>(i % 977 + 1));
  const uint8_t* received[] = {reinterpret_cast<const uint8_t*>(values.data()), reinterpret_cast<const uint8_t*>(values.data() + 3)};
  std::vector<std::vector<float>> folds;
  std::vector<double> sums;
  for (const auto& set : cpu::instruction_sets()) {
    auto& sum = folds.emplace_back(values);
    EncodeSum<math::Raw> fold;
    fold.numel = 10004;
    fold.own = fold.decoded = {sum.data()};
    fold.received = received;
    fold.count = 2;
    fold.own_position = 1;
    fold.scale = 0.3f;
    std::get<cpu::BlockLoop<EncodeSum<math::Raw>>>(set.loops->blocks).run(fold, fold.numel, 0, 40);
    const TensorList<1>::Row row{{values.data()}, nullptr, 10007, {}};
    std::get<cpu::ReduceLoop<Squares>>(set.loops->reductions).run({}, {}, row, 0, 10007, &sums.emplace_back());
    EXPECT_EQ(folds.back(), folds.front()) << set.name;
    EXPECT_EQ(sums.back(), sums.front()) << set.name;
  }
}

}  // namespace
}  // namespace dltrain
