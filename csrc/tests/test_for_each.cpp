#include "kernels/for_each.h"

#include <cmath>
#include <deque>
#include <limits>
#include <thread>

#include "tests/places.h"

namespace dltrain {
namespace {

void two_threads(int64_t n, int64_t, const Range& body) {
  std::thread other([&] { body(0, n / 3); });
  body(n / 3, n);
  other.join();
}

TEST(AdamW, OneElementAgainstDouble) {
  double p = 0.7, m = 0.1, v = 0.02;
  const double g = -0.3, lr = 1e-2, b1 = 0.8, b2 = 0.95, eps = 1e-6, wd = 0.1, step = 4;
  float pf = 0.7f, mf = 0.1f, vf = 0.02f;
  math::AdamW{b1, b2, eps, wd}.at(step, lr, 1.0)(pf, static_cast<float>(g), mf, vf);
  p *= 1 - lr * wd;
  m = b1 * m + (1 - b1) * g;
  v = b2 * v + (1 - b2) * g * g;
  p -= lr * (m / (1 - std::pow(b1, step))) / (std::sqrt(v / (1 - std::pow(b2, step))) + eps);
  EXPECT_NEAR(pf, p, 1e-7);
  EXPECT_NEAR(mf, m, 1e-8);
  EXPECT_NEAR(vf, v, 1e-8);
}

TEST(AdamW, AMSGradKeepsTheLargestAndANaN) {
  const auto element = math::AdamW{}.at(1, 1e-3, 1.0);
  float p = 1, m = 0, v = 0, max_v = 5;
  element(p, 1.0f, m, v, max_v);
  EXPECT_EQ(max_v, 5.0f);
  element(p, std::numeric_limits<float>::quiet_NaN(), m, v, max_v);
  EXPECT_TRUE(std::isnan(max_v));
}

TEST(SGD, OneElementAgainstDouble) {
  for (const bool nesterov : {false, true}) {
    for (const bool first : {false, true}) {
      double p = 0.7, b = first ? 0.0 : 0.4;
      const double g = -0.3, lr = 1e-2, mu = 0.9, tau = nesterov ? 0.0 : 0.1, wd = 0.2;
      float pf = 0.7f, bf = static_cast<float>(b);
      math::SGD{mu, tau, wd, nesterov}.at(first, lr, 0.5)(pf, static_cast<float>(2 * g), bf);
      const double d = g + wd * p;
      b = first ? d : mu * b + (1 - tau) * d;
      p -= lr * (nesterov ? d + mu * b : b);
      EXPECT_NEAR(pf, p, 1e-7);
      EXPECT_NEAR(bf, b, 1e-7);
    }
  }
}

// A list of tensors with K streams each, of the same values whatever the place and the alignment.
template <int K>
struct Rows {
  Rows(const Place& place, const std::vector<int64_t>& sizes, bool aligned = true) : counts(place, std::vector<float>(sizes.size(), 3.0f)) {
    for (size_t row = 0; row < sizes.size(); ++row) {
      std::array<void*, K> data;
      for (int k = 0; k < K; ++k) {
        std::vector<float> values;
        for (int64_t i = 0; i < sizes[row]; ++i)
          values.push_back(static_cast<float>((i * 7 + k * 5 + static_cast<int64_t>(row)) % 97 + 1) / 100);
        data[k] = arrays.emplace_back(place, values, aligned ? 0 : (row + k) % 4).data();
      }
      list.add(data, sizes[row], counts.data() + row);
    }
  }
  std::vector<std::vector<float>> values() const {
    std::vector<std::vector<float>> out;
    for (const auto& array : arrays) out.push_back(array.values());
    return out;
  }
  Array<float> counts;
  std::deque<Array<float>> arrays;
  TensorList<K> list;
};

const AdamW<4> adamw{{0.8, 0.95, 1e-6, 0.1}, {1e-2, false, {}}};

TEST(ForEach, TheSameBitsForAnyNumberOfThreads) {
  const std::vector<int64_t> sizes = {1, 0, 7, 40000, 3, 64, 100001};
  const auto run = [&](const Place& place) {
    Rows<4> rows({}, sizes);
    for_each(place, rows.list, adamw);
    return rows.values();
  };
  EXPECT_EQ(run({serial_for}), run({two_threads}));
}

TEST(ForEach, TheSameBitsForEveryInstructionSet) {
  const auto run = [](const auto& operation, const cpu::InstructionSet& set) {
    using Operation = std::decay_t<decltype(operation)>;
    Rows<Operation::streams> rows({}, {1, 7, 1001, 20003}, false);
    for (const auto& row : rows.list) {
      std::get<cpu::ElementLoop<Operation>>(set.loops->elements).run(operation.at(row.scalars), rows.list.form(), row, 0, row.numel);
    }
    return rows.values();
  };
  const auto same = [&](const auto& operation) {
    const auto& sets = cpu::instruction_sets();
    for (const auto& set : sets) EXPECT_EQ(run(operation, set), run(operation, sets.back())) << set.name;
  };
  same(adamw);
  same(AdamW<5>{adamw.hyper, adamw.step});
  same(SGD<2>{{0.0, 0.0, 0.1, false}, {0.1, true, {}}, false});
  same(SGD<3>{{0.9, 0.0, 0.1, true}, {0.1, false, {}}, false});
}

class ForEachOn : public OnEveryPlace {};
DLT_ON_EVERY_PLACE(ForEachOn);

// Every element exactly once, whatever the sizes and alignments; the gradient is left alone.
TEST_P(ForEachOn, IsTheElementsArithmetic) {
  const std::vector<int64_t> sizes = {1, 0, 7, 8192, 8193, 3, 64, 0, 30001, 4, 0};
  const auto check = [&](const auto& operation) {
    constexpr int K = std::decay_t<decltype(operation)>::streams;
    for (const bool aligned : {true, false}) {
      const Rows<K> rows(place(), sizes, aligned);
      auto expected = rows.values();
      for_each(place(), rows.list, operation);
      const float count = 3.0f;
      const auto element = operation.at(&count);
      for (size_t row = 0; row < sizes.size(); ++row) {
        for (int64_t i = 0; i < sizes[row]; ++i) {
          [&]<std::size_t... I>(std::index_sequence<I...>) { element(expected[row * K + I][i]...); }(std::make_index_sequence<K>{});
        }
      }
      const auto got = rows.values();
      for (size_t stream = 0; stream < expected.size(); ++stream) {
        for (size_t i = 0; i < expected[stream].size(); ++i) {
          // An element's constants come from pow, which devices round in their own way.
          ASSERT_NEAR(got[stream][i], expected[stream][i], 1e-6f) << "row " << stream / K << " stream " << stream % K << " element " << i;
        }
      }
    }
  };
  check(adamw);
  check(AdamW<5>{adamw.hyper, adamw.step});
  check(SGD<2>{{0.0, 0.0, 0.1, false}, {0.1, true, {}}, false});
  check(SGD<3>{{0.9, 0.0, 0.1, true}, {0.1, false, {}}, false});
}

TEST_P(ForEachOn, TakesMoreRowsThanOneLaunch) {
  const Rows<1> rows(place(), std::vector<int64_t>(3000, 1));
  auto expected = rows.values();
  for (auto& values : expected) values[0] += 1.0f;
  for_each(place(), rows.list, Advance{});
  EXPECT_EQ(rows.values(), expected);
}

TEST_P(ForEachOn, ReadsItsScalarsWhereTheTensorsLie) {
  const Array<float> lr(place(), {0.25f}), grad_scale(place(), {8.0f}), found_inf(place(), {2.0f}), none(place(), {0.0f});
  SGD<2> sgd{{}, {1.0, true, {lr.data(), grad_scale.data(), nullptr}}, false};
  const Array<float> p(place(), {1.0f}), g(place(), {16.0f});
  TensorList<2> list;
  list.add({p.data(), g.data()}, 1);
  for_each(place(), list, sgd);
  EXPECT_EQ(p.values()[0], 1.5f);  // 1 + 0.25 * 16 / 8
  sgd.step.scalars.found_inf = found_inf.data();
  for_each(place(), list, sgd);
  EXPECT_EQ(p.values()[0], 1.5f);
  sgd.step.scalars.found_inf = none.data();
  for_each(place(), list, sgd);
  EXPECT_EQ(p.values()[0], 2.0f);
}

TEST_P(ForEachOn, TakesEmptyLists) {
  for_each(place(), TensorList<1>{}, Advance{});
  const Rows<1> rows(place(), {0, 0});
  for_each(place(), rows.list, Advance{});
}

}  // namespace
}  // namespace dltrain
