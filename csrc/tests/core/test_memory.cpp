#include "core/memory.h"

#include "core/cuda/stream_queue.h"
#include "tests/contexts.h"

namespace dltrain {
namespace {

class MemoryOn : public OnEveryContext {};
DLT_ON_EVERY_CONTEXT(MemoryOn);

TEST_P(MemoryOn, HoldsWhatIsCopiedIntoIt) {
  const std::vector<int> values = {1, 2, 3};
  EXPECT_EQ(Array<int>(context(), values).values(), values);
  EXPECT_EQ(Array<int>(context(), {}).values(), std::vector<int>{});
  Memory a(context(), 100);
  void* const data = a.data();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
  Memory b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(a.data(), nullptr);
}

TEST_P(MemoryOn, BuffersOnlyGrow) {
  Buffer buffer;
  void* const first = buffer.reserve(context(), 100);
  EXPECT_EQ(buffer.reserve(context(), 50), first);
  EXPECT_NE(buffer.reserve(context(), 1 << 20), nullptr);
}

TEST(Memory, PinnedNeedsCUDA) {
  if (built_with_cuda) GTEST_SKIP() << "this build has it";
  EXPECT_THROW(Memory::pinned(0, 8), std::runtime_error);
}

class StreamQueueTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  }
};

// Many copies in sequence through two streams: a single missing dependency would show.
TEST_F(StreamQueueTest, OrdersItsWorkWithTheCallers) {
  if constexpr (built_with_cuda) {
    constexpr int64_t size = 1 << 16, bytes = size * sizeof(int);
    const ExecutionContext caller = cuda_context();
    const cuda::Stream stream(caller.device);
    cuda::StreamQueue queue(stream.context());
    const Memory a(caller, bytes), b(caller, bytes);
    const Memory staging = Memory::pinned(caller.device, bytes), back = Memory::pinned(caller.device, bytes);
    for (int turn = 0; turn < 20; ++turn) {
      std::fill_n(static_cast<int*>(staging.data()), size, turn);
      copy(caller, a.data(), staging.data(), bytes);
      queue.run(caller, [&](const ExecutionContext& context) { copy(context, b.data(), a.data(), bytes); });
      copy(caller, back.data(), b.data(), bytes);
      Event::record(caller).synchronize();
      for (int64_t i = 0; i < size; ++i) ASSERT_EQ(static_cast<int*>(back.data())[i], turn);
    }
    const Event done = queue.submit(caller, [&](const ExecutionContext& context) {
      const Memory scratch(context, bytes);  // freed in the order of the stream
      copy(context, scratch.data(), b.data(), bytes);
      copy(context, a.data(), scratch.data(), bytes);
    });
    done.synchronize();
    copy(caller, back.data(), a.data(), bytes);
    Event::record(caller).synchronize();
    EXPECT_EQ(static_cast<int*>(back.data())[size - 1], 19);
  }
}

}  // namespace
}  // namespace dltrain
