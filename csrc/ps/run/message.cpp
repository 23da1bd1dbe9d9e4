#include "ps/run/message.h"

#include <array>
#include <cstring>
#include <type_traits>

#include "core/check.h"

namespace dltrain::ps {

namespace {

constexpr uint32_t mark = 0x32537044;  // of this version of the format

struct Fixed {
  uint32_t mark = ps::mark;
  Kind kind = Kind::push;
  int64_t id = 0, clock = 0, staleness = -1;
  uint32_t skips = 0, differs = 0, with_data = 0, applied = 0;
  float weight = 1.0f;
  uint32_t unused = 0;
  std::array<int64_t, 4> counts{};  // of blocks, numbers, rates, and bytes of text
};
static_assert(std::is_trivially_copyable_v<Fixed>);

}  // namespace

std::vector<std::byte> pack(const Message& message) {
  Fixed fixed;
  fixed.kind = message.kind;
  fixed.id = message.id;
  fixed.clock = message.clock;
  fixed.staleness = message.staleness.value_or(-1);
  fixed.skips = message.skips;
  fixed.differs = message.differs;
  fixed.with_data = message.with_data;
  fixed.applied = message.applied;
  fixed.weight = message.weight;
  fixed.counts = {std::ssize(message.blocks), std::ssize(message.numbers), std::ssize(message.rates), std::ssize(message.text)};
  std::vector<std::byte> bytes;
  const auto append = [&](const void* data, size_t count) {
    const size_t before = bytes.size();
    bytes.resize(before + count);
    if (count > 0) std::memcpy(bytes.data() + before, data, count);
  };
  const auto append_all = [&](const auto& items) { append(items.data(), items.size() * sizeof items[0]); };
  append(&fixed, sizeof fixed);
  append_all(message.blocks);
  append_all(message.numbers);
  append_all(message.rates);
  append_all(message.text);
  bytes.resize(aligned(std::ssize(bytes)));
  return bytes;
}

Unpacked unpack(std::span<const std::byte> bytes) {
  size_t at = 0;
  const auto take = [&](void* to, int64_t count) {
    check(count >= 0 && static_cast<size_t>(count) <= bytes.size() - at, "message: expected ", count, " more bytes, got ",
          bytes.size() - at);
    if (count > 0) std::memcpy(to, bytes.data() + at, static_cast<size_t>(count));
    at += static_cast<size_t>(count);
  };
  Fixed fixed;
  take(&fixed, sizeof fixed);
  check(fixed.mark == mark, "message: expected one of this version of dltrain_ext, got something else");
  Unpacked found;
  Message& message = found.message;
  const auto take_all = [&](auto& items, int64_t count) {
    const auto size = static_cast<int64_t>(sizeof items[0]);
    check(count >= 0 && count <= std::ssize(bytes) / size, "message: expected fewer items, got ", count);
    items.resize(static_cast<size_t>(count));
    take(items.data(), count * size);
  };
  message.kind = fixed.kind;
  message.id = fixed.id;
  message.clock = fixed.clock;
  if (fixed.staleness >= 0) message.staleness = fixed.staleness;
  message.skips = fixed.skips != 0;
  message.differs = fixed.differs != 0;
  message.with_data = fixed.with_data != 0;
  message.applied = fixed.applied != 0;
  message.weight = fixed.weight;
  take_all(message.blocks, fixed.counts[0]);
  take_all(message.numbers, fixed.counts[1]);
  take_all(message.rates, fixed.counts[2]);
  take_all(message.text, fixed.counts[3]);
  const auto end = static_cast<size_t>(aligned(static_cast<int64_t>(at)));
  check(end <= bytes.size(), "message: expected ", end, " bytes, got ", bytes.size());
  found.data = bytes.subspan(end);
  return found;
}

}  // namespace dltrain::ps
