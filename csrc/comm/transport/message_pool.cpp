#include "comm/transport/message_pool.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "core/cache_line.h"
#include "core/check.h"

namespace dltrain::comm {

namespace {

// Messages of about the same length share blocks; at most a quarter of a block is not used.
int64_t capacity_for(int64_t bytes) {
  const auto wanted = static_cast<uint64_t>(std::max<int64_t>(bytes, cache_line));
  const uint64_t step = std::max<uint64_t>(std::bit_floor(wanted) / 4, cache_line);
  return static_cast<int64_t>((wanted + step - 1) / step * step);
}

}  // namespace

struct MessagePool::State {
  struct Release {
    void operator()(std::byte* block) const { ::operator delete(block, std::align_val_t{cache_line}); }
  };
  using Block = std::unique_ptr<std::byte, Release>;

  explicit State(int64_t kept_bytes) : limit(kept_bytes) {}

  Block take(int64_t capacity) {
    const std::lock_guard lock(mutex);
    const auto found = blocks.find(capacity);
    if (found == blocks.end() || found->second.empty()) return {};
    Block block = std::move(found->second.back());
    found->second.pop_back();
    bytes -= capacity;
    return block;
  }

  void give_back(Block block, int64_t capacity) {
    std::vector<Block> surplus;  // released outside of the mutex
    const std::lock_guard lock(mutex);
    blocks[capacity].push_back(std::move(block));
    bytes += capacity;
    while (bytes > limit) {
      const auto size = [](const auto& each) { return each.first * std::ssize(each.second); };
      const auto largest =
          std::max_element(blocks.begin(), blocks.end(), [&](const auto& left, const auto& right) { return size(left) < size(right); });
      surplus.push_back(std::move(largest->second.back()));
      largest->second.pop_back();
      bytes -= largest->first;
    }
  }

  const int64_t limit;
  std::mutex mutex;                              // guards what follows
  std::map<int64_t, std::vector<Block>> blocks;  // by capacity
  int64_t bytes = 0;
};

MessagePool::MessagePool(int64_t kept_bytes) : state_(std::make_shared<State>(kept_bytes)) {}

std::shared_ptr<std::byte> MessagePool::take(int64_t bytes) {
  check(bytes >= 0, "bytes: expected 0 or more, got ", bytes);
  const int64_t capacity = capacity_for(bytes);
  State::Block block = state_->take(capacity);
  if (!block) block.reset(static_cast<std::byte*>(::operator new(static_cast<size_t>(capacity), std::align_val_t{cache_line})));
  return {block.release(), [state = state_, capacity](std::byte* used) { state->give_back(State::Block(used), capacity); }};
}

}  // namespace dltrain::comm
