#include "core/queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>
#include <vector>

namespace dltrain {
namespace {

TEST(Queue, KeepsTheOrder) {
  Queue queue;
  std::vector<int> seen;
  for (int i = 0; i < 100; ++i) {
    if (i % 7 == 0) {
      queue.run([&seen, i] { seen.push_back(i); });
    } else {
      queue.submit([&seen, i] { seen.push_back(i); });
    }
  }
  queue.close();
  ASSERT_EQ(seen.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(seen[i], i);
}

TEST(Queue, RunsInTheCallingThreadWhenIdle) {
  Queue queue;
  std::thread::id ran_in;
  queue.run([&] { ran_in = std::this_thread::get_id(); });
  EXPECT_EQ(ran_in, std::this_thread::get_id());
}

TEST(Queue, NeverRunsTwoAtOnce) {
  Queue queue;
  std::atomic<int> inside = 0, worst = 0, done = 0;
  const auto task = [&] {
    worst = std::max<int>(worst, ++inside);
    std::this_thread::yield();
    --inside;
    ++done;
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) i % 2 ? queue.run(task) : queue.submit(task);
    });
  }
  for (auto& thread : threads) thread.join();
  queue.close();
  EXPECT_EQ(worst, 1);
  EXPECT_EQ(done, 200);
}

TEST(Queue, TakesNothingWhenClosed) {
  Queue queue;
  queue.close();
  EXPECT_THROW(queue.run([] {}), Queue::Closed);
  EXPECT_THROW(queue.submit([] {}), Queue::Closed);
}

TEST(Queue, MayBeDroppedByItsOwnTask) {
  auto* queue = new Queue;
  std::promise<void> ended;
  queue->submit([&] {
    EXPECT_TRUE(queue->in_worker());
    delete queue;
    ended.set_value();
  });
  ended.get_future().get();
}

TEST(Queue, PassesExceptionsOnAndContinues) {
  Queue queue;
  queue.submit([] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  EXPECT_THROW(queue.run([] { throw std::runtime_error("no"); }), std::runtime_error);
  EXPECT_THROW(queue.run([] { throw std::runtime_error("no"); }), std::runtime_error);
  bool ran = false;
  queue.run([&] { ran = true; });
  EXPECT_TRUE(ran);
  queue.close();
  EXPECT_THROW(queue.submit([] {}), std::runtime_error);
}

}  // namespace
}  // namespace dltrain
