#include "kernels/outer_step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "kernels/codec.h"
#include "tests/contexts.h"

namespace dltrain {
namespace {

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;

constexpr Dtype dtypes[] = {Dtype::fp32, Dtype::fp16, Dtype::bf16};
constexpr int64_t lengths[] = {0, 1, 31, 255, 256, 257, 1024, 1792 + 77};

Floats numbers(int64_t numel, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats out;
  for (int64_t i = 0; i < numel; ++i) out.push_back(normal(random));
  return out;
}

int64_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

Bytes as_elements(const Floats& values, Dtype dtype) {
  Bytes out(values.size() * size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    with_type({out.data(), dtype}, [&](auto* to) { to[i] = narrow<std::remove_pointer_t<decltype(to)>>(values[i]); });
  }
  return out;
}

Floats as_floats(const Bytes& elements, Dtype dtype) {
  Floats out(elements.size() / size_of(dtype));
  for (size_t i = 0; i < out.size(); ++i) {
    with_type({const_cast<uint8_t*>(elements.data()), dtype}, [&](const auto* from) { out[i] = widen(from[i]); });
  }
  return out;
}

Bytes bits_of_all(const Floats& values) { return as_elements(values, Dtype::fp32); }

Bytes encoded_on_cpu(const Codec& codec, const Floats& values) {
  Bytes out(codec.bytes(static_cast<int64_t>(values.size())));
  Sum sum;
  sum.numel = static_cast<int64_t>(values.size());
  sum.own = {const_cast<float*>(values.data())};
  sum.message = out.data();
  codec.encode_sum(cpu_context(), sum);
  return out;
}

Floats decoded_on_cpu(const Codec& codec, int64_t numel, const Bytes& message) {
  Floats out(numel);
  const Decoding decoding{numel, message.data(), {out.data()}};
  codec.decode_all(cpu_context(), {&decoding, 1});
  return out;
}

struct Case {
  Dtype dtype = Dtype::fp32;
  bool has_momentum = true, has_copy = false;
  math::OuterStep rule = {0.7f, 0.9f, true, 0.0f};
  int64_t offset = 0;
};

struct State {
  Bytes message, parameter, copy;
  Floats backup, momentum;
  int nonfinite = 0;
};

// An outer step as the header writes it.
State expected_of(const Codec& codec, const Case& c, State state) {
  const auto numel = static_cast<int64_t>(state.backup.size());
  const Floats mean = decoded_on_cpu(codec, numel, state.message);
  Floats parameter = as_floats(state.parameter, c.dtype);
  for (int64_t i = 0; i < numel; ++i) {
    float& b = state.backup[i];
    if (std::isfinite(mean[i])) {
      float direction = mean[i];
      if (c.has_momentum) {
        float& m = state.momentum[i];
        m = c.rule.momentum * m;
        m = m + mean[i];
        const float kept = c.rule.momentum * m;
        direction = c.rule.nesterov ? mean[i] + kept : m;
      }
      const float step = c.rule.lr * direction;
      b = b - step;
    } else {
      state.nonfinite = 1;
    }
    if (c.rule.mix == 0.0f) {
      parameter[i] = b;
    } else {
      const float own = c.rule.mix * parameter[i], outer = (1.0f - c.rule.mix) * b;
      parameter[i] = own + outer;
    }
  }
  state.parameter = as_elements(parameter, c.dtype);
  if (c.has_copy) state.copy = as_elements(parameter, Dtype::bf16);
  return state;
}

class OuterStepOn : public OnEveryContext {
 protected:
  struct Arrays {
    Arrays(const ExecutionContext& context, const Case& c, const State& state)
        : message(context, state.message),
          parameter(context, state.parameter, c.offset * size_of(c.dtype)),
          copy(context, state.copy, c.offset * 2),
          backup(context, state.backup, c.offset),
          momentum(context, state.momentum, c.offset),
          nonfinite(context, {state.nonfinite}) {}

    Array<uint8_t> message, parameter, copy;
    Array<float> backup, momentum;
    Array<int> nonfinite;
  };

  // Takes the steps of all states in one call.
  std::vector<State> run(const Codec& codec, const Case& c, std::vector<State> states) {
    std::vector<std::unique_ptr<Arrays>> arrays;
    std::vector<OuterUpdate> updates;
    for (const State& state : states) {
      const Arrays& at = *arrays.emplace_back(std::make_unique<Arrays>(context(), c, state));
      OuterUpdate update;
      update.numel = static_cast<int64_t>(state.backup.size());
      update.message = at.message.data();
      update.backup = at.backup.data();
      if (c.has_momentum) update.momentum = at.momentum.data();
      update.parameter = {at.parameter.data(), c.dtype};
      if (c.has_copy) update.copy = {at.copy.data(), Dtype::bf16};
      update.nonfinite = at.nonfinite.data();
      update.rule = c.rule;
      updates.push_back(update);
    }
    codec.outer_steps(context(), updates);
    for (size_t i = 0; i < states.size(); ++i) {
      const Arrays& at = *arrays[i];
      states[i] = {states[i].message,  at.parameter.values(), at.copy.values(),
                   at.backup.values(), at.momentum.values(),  at.nonfinite.values()[0]};
    }
    return states;
  }

  static State state_of(const Codec& codec, const Case& c, const Floats& mean) {
    const auto numel = static_cast<int64_t>(mean.size());
    return {encoded_on_cpu(codec, mean), as_elements(numbers(numel, 2), c.dtype), as_elements(numbers(numel, 3), Dtype::bf16),
            numbers(numel, 4), numbers(numel, 5)};
  }

  void expect_the_step(const Codec& codec, const Case& c, const std::vector<Floats>& means) {
    SCOPED_TRACE(codec.name);
    std::vector<State> before;
    for (const Floats& mean : means) before.push_back(state_of(codec, c, mean));
    const std::vector<State> after = run(codec, c, before);
    for (size_t i = 0; i < means.size(); ++i) {
      SCOPED_TRACE(means[i].size());
      const State expected = expected_of(codec, c, before[i]);
      EXPECT_EQ(bits_of_all(after[i].backup), bits_of_all(expected.backup));
      EXPECT_EQ(bits_of_all(after[i].momentum), bits_of_all(expected.momentum));
      EXPECT_EQ(after[i].parameter, expected.parameter);
      EXPECT_EQ(after[i].copy, expected.copy);
      EXPECT_EQ(after[i].nonfinite, expected.nonfinite);
    }
  }

  static std::vector<Floats> means() {
    std::vector<Floats> out;
    for (const int64_t numel : lengths) out.push_back(numbers(numel, 7));
    return out;
  }
};
DLT_ON_EVERY_CONTEXT(OuterStepOn);

TEST_P(OuterStepOn, IsThatOfPlainLoopsForAnyLength) {
  for (const Codec& codec : codecs()) expect_the_step(codec, {}, means());
}

TEST_P(OuterStepOn, TakesEveryRule) {
  for (const Codec& codec : codecs()) {
    for (const math::OuterStep& rule : {math::OuterStep{0.5f, 0.9f, false}, {0.7f, 0.9f, true, 0.25f}, {1.0f, 0.5f, false, 0.75f}}) {
      expect_the_step(codec, {.rule = rule}, {numbers(300, 7)});
    }
    for (const float mix : {0.0f, 0.5f}) {
      expect_the_step(codec, {.has_momentum = false, .rule = {0.8f, 0.0f, false, mix}}, {numbers(300, 7)});
    }
  }
}

TEST_P(OuterStepOn, WritesParametersOfAnyTypeAndCopiesAtAnyAlignment) {
  for (const Codec& codec : codecs()) {
    for (const Dtype dtype : dtypes) {
      for (const bool has_copy : {false, true}) {
        for (const float mix : {0.0f, 0.5f}) {
          expect_the_step(codec, {dtype, true, has_copy, {0.7f, 0.9f, true, mix}, 1}, {numbers(300, 7), numbers(5, 8)});
        }
      }
    }
  }
}

TEST_P(OuterStepOn, KeepsElementsWhoseMeanIsNotFinite) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const Codec& codec : codecs()) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), inf, -inf}) {
      std::vector<Floats> spoilt = {numbers(1792 + 77, 7), numbers(256, 8), numbers(3, 9)};
      for (Floats& mean : spoilt) mean[mean.size() / 2] = bad;
      for (const bool has_momentum : {true, false}) {
        expect_the_step(codec, {.has_momentum = has_momentum, .rule = {0.7f, has_momentum ? 0.9f : 0.0f, has_momentum}}, spoilt);
      }
    }
  }
}

// A short tile is processed after a whole one that is not finite, perhaps in the same memory.
TEST_P(OuterStepOn, DoesNotCallAShortTileNotFiniteForItsNeighbours) {
  for (const Codec& codec : codecs()) {
    Floats spoilt(1024, std::numeric_limits<float>::quiet_NaN());
    expect_the_step(codec, {}, {spoilt, numbers(3, 7), spoilt, numbers(257, 8)});
  }
}

TEST_P(OuterStepOn, LeavesTheMomentumAloneWithoutOne) {
  const Codec& codec = find_codec("raw");
  const Case c{.has_momentum = false, .rule = {1.0f, 0.0f, false}};
  const State before = state_of(codec, c, numbers(300, 7));
  EXPECT_EQ(run(codec, c, {before})[0].momentum, before.momentum);
}

struct Difference {
  const Codec& codec;
  int64_t numel;
  Dtype dtype;
  int received = 0, position = 0;
  bool residual = false, stochastic = false, encodes = true;
};

struct Outcome {
  Bytes message, decoded, residual, own;
};

class DifferenceOn : public OnEveryContext {
 protected:
  // minus: null, or as many elements as own.
  Outcome sum_of(const Difference& d, const Floats& own_values, const Bytes* minus_elements) {
    const Array<float> own(context(), own_values), decoded(context(), Floats(d.numel)), residual(context(), numbers(d.numel, 5));
    const Array<uint8_t> message(context(), Bytes(d.codec.bytes(d.numel)));
    const Array<uint8_t> minus(context(), minus_elements ? *minus_elements : Bytes(), size_of(d.dtype));
    std::vector<std::unique_ptr<Array<uint8_t>>> received;
    std::vector<const uint8_t*> pointers;
    for (int k = 0; k < d.received; ++k) {
      const Bytes bytes = encoded_on_cpu(d.codec, numbers(d.numel, 20 + k));
      pointers.push_back(received.emplace_back(std::make_unique<Array<uint8_t>>(context(), bytes))->data());
    }
    Sum sum;
    sum.numel = d.numel;
    sum.own = {own.data()};
    if (minus_elements) sum.minus = {minus.data(), d.dtype};
    sum.scale = 1.0f / 3;
    sum.received = pointers.data();
    sum.count = d.received;
    sum.own_position = d.position;
    if (d.residual) sum.feedback.residual = {residual.data()};
    sum.feedback.keeps_idle = true;
    if (d.encodes) sum.message = message.data();
    sum.decoded = {decoded.data()};
    sum.rounding = {d.stochastic, {uint64_t{1} << 40, 5, 2}, 1024};
    d.codec.encode_sum(context(), sum);
    return {message.values(), bits_of_all(decoded.values()), bits_of_all(residual.values()), bits_of_all(own.values())};
  }

  void expect_as_precomputed(const Difference& d, Floats own, const Floats& others) {
    SCOPED_TRACE(d.codec.name + " of " + std::to_string(d.numel));
    const Bytes minus = as_elements(others, d.dtype);
    const Floats rounded = as_floats(as_elements(own, d.dtype), d.dtype), subtracted = as_floats(minus, d.dtype);
    Floats differences;
    for (int64_t i = 0; i < d.numel; ++i) differences.push_back(rounded[i] - subtracted[i]);
    const Outcome found = sum_of(d, own, &minus), expected = sum_of(d, differences, nullptr);
    EXPECT_EQ(found.message, expected.message);
    EXPECT_EQ(found.decoded, expected.decoded);
    EXPECT_EQ(found.residual, expected.residual);
    EXPECT_EQ(found.own, bits_of_all(own));
  }
};
DLT_ON_EVERY_CONTEXT(DifferenceOn);

TEST_P(DifferenceOn, IsEncodedAsIfItHadBeenComputedBefore) {
  for (const Codec& codec : codecs()) {
    for (const Dtype dtype : dtypes) {
      for (const int64_t numel : {1, 77, 256, 300}) {
        for (const bool residual : {false, true}) {
          expect_as_precomputed({codec, numel, dtype, 0, 0, residual}, numbers(numel, 1), numbers(numel, 2));
        }
      }
      expect_as_precomputed({codec, 300, dtype, 0, 0, false, codec.is_lossy()}, numbers(300, 1), numbers(300, 2));
    }
  }
}

TEST_P(DifferenceOn, IsAddedAtItsPosition) {
  for (const Codec& codec : codecs()) {
    for (const Dtype dtype : dtypes) {
      for (const int position : {0, 1, 2}) {
        for (const bool encodes : {false, true}) {
          expect_as_precomputed({codec, 300, dtype, 2, position, encodes, false, encodes}, numbers(300, 1), numbers(300, 2));
        }
      }
    }
  }
}

// Own is rounded to the type of what is subtracted, so that a copy of it in a half type has not moved.
TEST_P(DifferenceOn, IsZeroForARoundedCopy) {
  for (const Codec& codec : codecs()) {
    for (const Dtype dtype : dtypes) {
      const Floats own = numbers(300, 1);
      const Difference d{codec, 300, dtype};
      const Bytes copy = as_elements(own, dtype);
      for (const float value : as_floats(sum_of(d, own, &copy).decoded, Dtype::fp32)) EXPECT_EQ(value, 0.0f) << codec.name;
      expect_as_precomputed({codec, 300, dtype, 0, 0, true}, own, own);
    }
  }
}

TEST_P(DifferenceOn, IsNotFiniteWhereAValueIsNot) {
  for (const Codec& codec : codecs()) {
    Floats others = numbers(300, 2);
    others[7] = std::numeric_limits<float>::quiet_NaN();
    others[290] = -std::numeric_limits<float>::infinity();
    for (const Dtype dtype : dtypes) {
      const Bytes minus = as_elements(others, dtype);
      const Floats found = as_floats(sum_of({codec, 300, dtype}, numbers(300, 1), &minus).decoded, Dtype::fp32);
      EXPECT_FALSE(std::isfinite(found[7]) || std::isfinite(found[290])) << codec.name;
    }
  }
}

}  // namespace
}  // namespace dltrain
