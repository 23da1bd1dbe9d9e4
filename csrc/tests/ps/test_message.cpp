#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "ps/run/message.h"

namespace dltrain::ps {
namespace {

Message full_message() {
  return {.kind = Kind::values,
          .id = -7,
          .clock = 1LL << 40,
          .staleness = 3,
          .applied = true,
          .weight = 0.25f,
          .skips = true,
          .with_data = true,
          .differs = true,
          .blocks = {0, 5, -1},
          .numbers = {1LL << 50, 0},
          .rates = {0.1, -2.5, 0.0},
          .text = "why it is so"};
}

void expect_equal(const Message& left, const Message& right) {
  EXPECT_EQ(left.kind, right.kind);
  EXPECT_EQ(left.id, right.id);
  EXPECT_EQ(left.clock, right.clock);
  EXPECT_EQ(left.staleness, right.staleness);
  EXPECT_EQ(left.applied, right.applied);
  EXPECT_EQ(left.weight, right.weight);
  EXPECT_EQ(left.skips, right.skips);
  EXPECT_EQ(left.with_data, right.with_data);
  EXPECT_EQ(left.differs, right.differs);
  EXPECT_EQ(left.blocks, right.blocks);
  EXPECT_EQ(left.numbers, right.numbers);
  EXPECT_EQ(left.rates, right.rates);
  EXPECT_EQ(left.text, right.text);
}

TEST(PsMessage, ComesBackWithItsData) {
  for (const Message& message : {Message(), full_message(), Message{.kind = Kind::pull, .staleness = 0}}) {
    std::vector<std::byte> bytes = pack(message);
    ASSERT_EQ(bytes.size() % Message::alignment, 0U);
    const size_t fields = bytes.size();
    for (const size_t count : {0, 1, 64}) {
      bytes.resize(fields + count, std::byte{0xa5});
      const Unpacked found = unpack(bytes);
      expect_equal(found.message, message);
      EXPECT_EQ(found.data.data(), bytes.data() + fields);
      EXPECT_EQ(found.data.size(), count);
    }
  }
}

TEST(PsMessage, IsNotUnpackedWhereItsEndIsMissing) {
  for (const Message& message : {Message(), full_message()}) {
    const std::vector<std::byte> bytes = pack(message);
    for (size_t count = 0; count < bytes.size(); ++count) {
      // Memory of exactly this length, so that a sanitizer sees a read behind it.
      const std::vector<std::byte> prefix(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
      EXPECT_THROW(unpack(prefix), std::invalid_argument) << count << " of " << bytes.size() << " bytes";
    }
  }
}

TEST(PsMessage, WithOtherBytesIsAnErrorOrAnotherMessage) {
  const std::vector<std::byte> bytes = pack(full_message());
  std::mt19937 random(1);
  size_t errors = 0, others = 0;
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int i = 0; i < 8; ++i) {
      std::vector<std::byte> changed = bytes;
      changed[at] ^= static_cast<std::byte>(1U << i);
      if (i % 2 == 1) changed[random() % changed.size()] = static_cast<std::byte>(random());
      try {
        const Unpacked found = unpack(changed);
        EXPECT_LE(found.message.text.size(), changed.size());
        ++others;
      } catch (const std::invalid_argument&) {
        ++errors;
      }
    }
  }
  EXPECT_GT(errors, 0U);
  EXPECT_GT(others, 0U);
}

}  // namespace
}  // namespace dltrain::ps
