// Tests the regions of a tensor, each with its own codec and its own division.

#include "comm/program/layout.h"

#include <cmath>
#include <limits>
#include <random>

#include "comm/plan/plan.h"
#include "tests/comm/ranks.h"
#include "tests/contexts.h"

namespace dltrain::comm {
namespace {

const Codec& codec(const char* name) { return find_codec(name); }

TEST(Layout, IsDividedByRegion) {
  const Layout layout = {{{3, 5000}, &codec("int8"), 0}, {{5010, 10}, &codec("raw"), 5000}, {{5020, 2'000'001}, &codec("int4"), 5012}};
  for (const int segments : {1, 2, 5}) {
    const auto cut = cut_by_region(layout, segments);
    EXPECT_LE(std::ssize(cut), segments);
    for (const int parts : {1, 3, 4}) {
      std::vector<int> covered(5020 + 2'000'001);
      for (const auto& pieces : cut) {
        for (const Piece& piece : pieces) {
          for (int i = 0; i < parts; ++i) {
            const Piece part = piece.part(parts, i);
            const int64_t skipped = part.span.first - piece.span.first;
            EXPECT_TRUE(skipped % piece.grain == 0 || part.span.count == 0);
            EXPECT_EQ(part.number - piece.number, skipped);
            for (int64_t k = 0; k < part.span.count; ++k) ++covered[part.span.first + k];
          }
        }
      }
      for (int64_t k = 0; k < std::ssize(covered); ++k) ASSERT_EQ(covered[k], k < 3 || (k >= 5003 && k < 5010) ? 0 : 1) << k;
    }
  }
}

TEST(Layout, DividesARegionIndependentlyOfOthers) {
  const Region region{{100, 1'300'000}, &codec("int8"), 4096};
  const auto parts_of = [&](const Layout& layout, int segments) {
    std::vector<Span> spans;
    for (const auto& pieces : cut_by_region(layout, segments)) {
      for (const Piece& piece : pieces) {
        if (piece.codec != region.codec) continue;
        for (int i = 0; i < 3; ++i) spans.push_back(piece.part(3, i).span);
      }
    }
    return spans;
  };
  const auto alone = parts_of({region}, 1);
  EXPECT_EQ(alone, parts_of({{{0, 90}, &codec("raw"), 0}, region, {{2'000'000, 77}, &codec("int4"), 9'999'996}}, 1));
  EXPECT_EQ(alone, parts_of({{{0, 90}, &codec("raw"), 0}, region}, 4));
}

TEST(Layout, SpreadsSmallRegionsOverTheChunks) {
  Layout layout;
  for (int64_t i = 0; i < 400; ++i) layout.push_back({{i * 64, 64}, &codec("raw"), i * 64});
  std::vector<int> chunks(4);
  for (const auto& pieces : cut_by_region(layout, 1)) {
    for (const Piece& piece : pieces) {
      for (int i = 0; i < 4; ++i) chunks[i] += piece.part(4, i).span.count > 0;
    }
  }
  for (const int count : chunks) EXPECT_NEAR(count, 100, 30);
}

// A region with an owner is in the chunk of that owner only, and each owner's regions are spread evenly over the segments.
TEST(Layout, GivesRegionsToTheirOwners) {
  Layout layout;
  for (int64_t owner = 0; owner < 3; ++owner) {
    layout.push_back({{owner * 2'000'000, 1'900'000}, &codec("int8"), owner * 2'000'000, owner});
    layout.push_back({{owner * 2'000'000 + 1'900'000, 7}, &codec("raw"), owner * 2'000'000 + 1'900'000, owner});
  }
  for (const int segments : {1, 3}) {
    const auto cut = cut_by_region(layout, segments);
    EXPECT_EQ(std::ssize(cut), segments);
    std::vector<int64_t> owned(3);
    for (const auto& pieces : cut) {
      std::vector<int64_t> here(3);
      for (const Piece& piece : pieces) {
        for (int i = 0; i < 3; ++i) {
          const Piece part = piece.part(3, i);
          EXPECT_EQ(part.span.count, i == piece.owner ? piece.span.count : 0);
          here[i] += part.span.count;
        }
      }
      for (int i = 0; i < 3; ++i) owned[i] += here[i];
      EXPECT_TRUE(here[0] > 0 && here[0] == here[1] && here[1] == here[2]);
    }
    EXPECT_EQ(owned, (std::vector<int64_t>{1'900'007, 1'900'007, 1'900'007}));
  }
  Layout others = layout;
  others.back().owner = 0;
  EXPECT_NE(digest(layout), digest(others));
}

TEST(Layout, CanBeRestrictedToASpan) {
  const Layout layout = {{{0, 10}, &codec("raw"), 0}, {{10, 100}, &codec("int8"), 12}, {{200, 10}, &codec("raw"), 112}};
  const Layout expected = {{{0, 85}, &codec("int8"), 12 + 12}, {{175, 5}, &codec("raw"), 112}};
  EXPECT_EQ(within(layout, {25, 180}), expected);
  EXPECT_TRUE(within(layout, {120, 50}).empty());
  EXPECT_NE(digest(layout), digest(expected));
}

constexpr int64_t numel = 3000;

// int8, a gap, raw, and int4 with an incomplete last block.
Layout mixed() { return {{{5, 1030}, &codec("int8"), 0}, {{1040, 61}, &codec("raw"), 1032}, {{1101, 1500}, &codec("int4"), 1096}}; }

std::vector<float> given(int rank) {
  std::mt19937 random(rank + 1);
  std::normal_distribution<float> normal;
  std::vector<float> values(numel);
  for (float& value : values) value = normal(random);
  return values;
}

using Values = std::vector<std::vector<float>>;  // by rank

struct Outcome {
  Values values, residuals;
};

Outcome reduce(const ExecutionContext& context, int world_size, const std::string& algorithm, const Layout& layout, int segments = 0) {
  Outcome out{Values(world_size), Values(world_size)};
  on_ranks(
      world_size,
      [&](Executor& executor, Runner& runner) {
        const Array<float> values(context, given(executor.rank())), residual(context, std::vector<float>(numel, 0.125f));
        CallOptions call;
        call.algorithm = algorithm;
        call.codec = "int8";
        call.average = true;
        call.segments = segments;
        call.layout = &layout;
        call.feedback.residual = {residual.data()};
        runner.run(executor, {values.data()}, numel, call);
        out.values[executor.rank()] = values.values();
        out.residuals[executor.rank()] = residual.values();
      },
      context);
  return out;
}

std::vector<float> part(const std::vector<float>& values, const Span& span) {
  return {values.begin() + span.first, values.begin() + span.first + span.count};
}

class LayoutOn : public OnEveryContext {
 protected:
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const std::string& name : algorithms()) {
      if (!make_plan(Collective::all_reduce, name, 0, 1).exact && (!is_slow(context()) || name == "direct")) out.push_back(name);
    }
    return out;
  }
};
DLT_ON_EVERY_CONTEXT(LayoutOn);

// The results equal those of reducing each region alone, with any number of segments and any values between the regions.
TEST_P(LayoutOn, ReducesEachRegionAsIfAlone) {
  const Layout layout = mixed();
  for (const int world_size : is_slow(context()) ? std::vector{3} : std::vector{1, 2, 3, 4, 5}) {
    for (const std::string& algorithm : names()) {
      SCOPED_TRACE(algorithm + ", " + std::to_string(world_size) + " ranks");
      const Outcome together = reduce(context(), world_size, algorithm, layout), cut = reduce(context(), world_size, algorithm, layout, 3);
      EXPECT_EQ(together.values, cut.values);
      EXPECT_EQ(together.residuals, cut.residuals);
      for (const Region& region : layout) {
        const Outcome alone = reduce(context(), world_size, algorithm, {region});
        for (int rank = 0; rank < world_size; ++rank) {
          EXPECT_EQ(part(together.values[rank], region.span), part(alone.values[rank], region.span));
          EXPECT_EQ(part(together.residuals[rank], region.span), part(alone.residuals[rank], region.span));
        }
      }
      for (int rank = 0; rank < world_size; ++rank) {
        EXPECT_EQ(part(together.values[rank], {0, 5}), part(given(rank), {0, 5}));  // elements outside of the regions do not change
        EXPECT_EQ(part(together.values[rank], {1035, 5}), part(given(rank), {1035, 5}));
        EXPECT_EQ(part(together.values[rank], {1040, 1561}), part(together.values[0], {1040, 1561}));
      }
      for (int64_t i = 1040; i < 1101; ++i) {  // raw is lossless, so the residual is added completely
        double sum = 0.125 * world_size;
        for (int rank = 0; rank < world_size; ++rank) sum += given(rank)[i] / static_cast<double>(world_size);
        EXPECT_NEAR(together.values[0][i], sum, 1e-5);
        for (const auto& residual : together.residuals) EXPECT_NEAR(residual[i], 0.0, 1e-6);
      }
    }
  }
}

// Tests how a codec uses a residual with double buffering.
class FeedbackOn : public OnEveryContext {
 protected:
  struct Both {
    std::vector<float> residual, other;
  };

  // Encodes own with 1 in the current buffer of the residual and 2 in the other one.
  Both encode(const std::vector<float>& own, bool swapped, bool keeps_idle) {
    const auto count = std::ssize(own);
    const Array<float> values(context(), own), residual(context(), std::vector<float>(count, 1.0f)),
        other(context(), std::vector<float>(count, 2.0f));
    const Array<uint8_t> flag(context(), {static_cast<uint8_t>(swapped)}),
        message(context(), std::vector<uint8_t>(codec("int8").bytes(count)));
    Sum sum;
    sum.numel = count;
    sum.own = {values.data()};
    sum.feedback = {{residual.data()}, {other.data()}, flag.data(), nullptr, keeps_idle};
    sum.message = message.data();
    codec("int8").encode_sum(context(), sum);
    return {residual.values(), other.values()};
  }
};
DLT_ON_EVERY_CONTEXT(FeedbackOn);

TEST_P(FeedbackOn, WritesToTheOtherBuffer) {
  std::vector<float> own(512);
  for (int i = 0; i < 512; ++i) own[i] = static_cast<float>(i % 100) * 0.37f;
  const std::vector<float> ones(512, 1.0f), twos(512, 2.0f);
  const Both straight = encode(own, false, false), swapped = encode(own, true, false);
  EXPECT_EQ(straight.residual, ones);
  EXPECT_EQ(swapped.other, twos);
  for (int i = 0; i < 512; ++i) {  // errors of 1 + own and of 2 + own, whose largest element is below 39
    EXPECT_LE(std::abs(straight.other[i]), 39.0f / 254 * 1.001f);
    EXPECT_LE(std::abs(swapped.residual[i]), 39.0f / 254 * 1.001f);
  }
  EXPECT_NE(straight.other, swapped.residual);
}

TEST_P(FeedbackOn, KeepsTheResidualOfZeroBlocks) {
  std::vector<float> own(512 + 77);
  own[300] = 126.0f;  // in the second block
  const Both waits = encode(own, false, true), goes = encode(own, false, false);
  for (int i = 0; i < 589; ++i) {
    const bool idle = i / 256 != 1;
    EXPECT_EQ(waits.residual[i], 1.0f);
    EXPECT_EQ(waits.other[i] == 1.0f, idle) << i;
    EXPECT_NE(goes.other[i], 1.0f) << i;
  }
}

TEST_P(FeedbackOn, KeepsTheResidualOfBlocksThatAreNotFinite) {
  std::vector<float> own(512, 3.0f);
  own[5] = std::numeric_limits<float>::quiet_NaN();
  const Both straight = encode(own, false, true), swapped = encode(own, true, true);
  for (int i = 0; i < 256; ++i) {
    EXPECT_EQ(straight.other[i], 1.0f);
    EXPECT_EQ(swapped.residual[i], 2.0f);
  }
  EXPECT_NE(straight.other[300], 1.0f);
}

}  // namespace
}  // namespace dltrain::comm
