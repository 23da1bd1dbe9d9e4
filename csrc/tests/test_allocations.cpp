// Tests that a repeated call allocates nothing, over a transport that does not allocate either.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "comm/plan/plan.h"
#include "comm/run/executor.h"
#include "kernels/codec.h"

namespace {

std::atomic<int64_t> allocations = 0;

void* allocate(size_t bytes, size_t alignment) {
  ++allocations;
  void* const memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) { return allocate(bytes, static_cast<size_t>(alignment)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace dltrain::comm {
namespace {

// A few messages from one rank to another, in memory that is not freed.
struct Pipe {
  static constexpr size_t most = 16;
  std::mutex mutex;
  std::condition_variable changed;
  std::array<std::vector<char>, most> messages;
  size_t sent = 0, received = 0;
};

class PipeRequest : public Request {
 public:
  PipeRequest(Pipe* pipe, void* data, int64_t bytes) : pipe_(pipe), data_(data), bytes_(bytes) {}
  void wait(Deadline deadline) override {
    if (!pipe_) return;
    std::unique_lock lock(pipe_->mutex);
    if (!pipe_->changed.wait_until(lock, deadline, [this] { return pipe_->sent > pipe_->received; })) throw TransportError("nothing came");
    std::memcpy(data_, pipe_->messages[pipe_->received++ % Pipe::most].data(), static_cast<size_t>(bytes_));
  }
  void abort() override {}

  static void* operator new(size_t bytes) { return std::malloc(bytes); }
  static void operator delete(void* memory) { std::free(memory); }

 private:
  Pipe* pipe_;
  void* data_;
  int64_t bytes_;
};

using Pipes = std::array<std::array<Pipe, 4>, 4>;

class PipeTransport : public Transport {
 public:
  PipeTransport(Pipes& pipes, int rank) : pipes_(pipes), rank_(rank) {}
  int rank() const override { return rank_; }
  int world_size() const override { return 4; }
  std::unique_ptr<Request> send(const ExecutionContext&, int peer, const void* data, int64_t bytes, int) override {
    Pipe& pipe = pipes_[rank_][peer];
    std::lock_guard lock(pipe.mutex);
    auto& message = pipe.messages[pipe.sent++ % Pipe::most];
    if (static_cast<int64_t>(message.size()) < bytes) message.resize(bytes);
    std::memcpy(message.data(), data, static_cast<size_t>(bytes));
    pipe.changed.notify_all();
    return std::make_unique<PipeRequest>(nullptr, nullptr, 0);
  }
  std::unique_ptr<Request> recv(const ExecutionContext&, int peer, void* data, int64_t bytes, int) override {
    return std::make_unique<PipeRequest>(&pipes_[peer][rank_], data, bytes);
  }

 private:
  Pipes& pipes_;
  int rank_;
};

TEST(Executor, AllocatesNothingInSteadyState) {
  for (const char* codec : {"raw", "int8"}) {
    std::vector<std::string> all = algorithms();
    all.emplace_back("auto");
    for (const std::string& algorithm : all) {
      if (codec != std::string("raw") && algorithm != "auto" && make_plan(Collective::all_reduce, algorithm, 0, 1).exact) continue;
      Pipes pipes;
      int64_t before = 0, after = 0;
      std::mutex mutex;
      std::condition_variable changed;
      int arrived = 0;
      const auto meet = [&](int count) {  // a barrier that does not allocate
        std::unique_lock lock(mutex);
        ++arrived;
        changed.notify_all();
        changed.wait(lock, [&] { return arrived >= count; });
      };
      std::vector<std::thread> threads;
      for (int rank = 0; rank < 4; ++rank) {
        threads.emplace_back([&, rank] {
          Executor executor(std::make_unique<PipeTransport>(pipes, rank));
          std::vector<float> values(50'000, 1.0f);
          CallOptions call;
          call.algorithm = algorithm;
          call.codec = codec;
          call.segments = 3;
          call.measures = true;
          const auto again = [&](int times) {
            for (int i = 0; i < times; ++i) executor.run({}, {values.data()}, std::ssize(values), call);
          };
          again(Pipe::most + 1);
          meet(4);
          if (rank == 0) before = allocations;
          meet(8);
          again(5);
          meet(12);
          if (rank == 0) after = allocations;
          meet(16);
        });
      }
      for (auto& thread : threads) thread.join();
      EXPECT_GT(before, 0);
      EXPECT_EQ(after - before, 0) << algorithm << " " << codec;
    }
  }
}

}  // namespace
}  // namespace dltrain::comm
