#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "comm/run/executor.h"
#include "comm/transport/framed_transport.h"
#include "comm/transport/in_process.h"
#include "core/cuda/runtime.h"
#include "core/cuda/stream_queue.h"
#include "core/execution_context.h"

namespace dltrain::comm {

// On a device this is a stream of its own, because ranks that share a stream would wait for each other.
class OwnContext {
 public:
  explicit OwnContext(const ExecutionContext& kind) {
    if constexpr (built_with_cuda) {
      if (kind.on_cuda()) stream_ = std::make_shared<cuda::Stream>(kind.device);
    }
  }
  ExecutionContext context() const {
    if constexpr (built_with_cuda) {
      if (stream_) return stream_->context();
    }
    return {};
  }

 private:
  std::shared_ptr<cuda::Stream> stream_;  // shared_ptr, because a build without CUDA has no destructor of Stream
};

// Runs a rank's calls: in the calling thread or, on a CUDA device, in a queue with its own stream.
class Runner {
 public:
  explicit Runner(const ExecutionContext& context) : context_(context) {
    if constexpr (built_with_cuda) {
      if (!context.on_cuda()) return;
      stream_ = std::make_shared<cuda::Stream>(context.device);
      queue_ = std::make_shared<cuda::StreamQueue>(stream_->context());
    }
  }
  void run(Executor& executor, const TypedPointer& values, int64_t numel, const CallOptions& call) {
    const auto task = [&](const ExecutionContext& where) { executor.run(where, values, numel, call); };
    if constexpr (built_with_cuda) {
      if (queue_) return queue_->run(context_, task);
    }
    task(context_);
  }

 private:
  ExecutionContext context_;
  std::shared_ptr<cuda::Stream> stream_;  // shared_ptr, because a build without CUDA has no destructor of Stream
  std::shared_ptr<cuda::StreamQueue> queue_;
};

// Runs body(executor, runner) on a rank for each of these ends, in a thread each.
template <class Body>
void on_ranks(std::vector<std::unique_ptr<Transport>> ends, Body body, const ExecutionContext& context = {}) {
  std::vector<std::thread> threads;
  for (auto& end : ends) {
    threads.emplace_back([&body, &context, end = std::move(end)]() mutable {
      Runner runner(context);  // outlives the executor, whose memory is freed on its stream
      Executor executor(std::move(end));
      body(executor, runner);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Likewise, on ranks in this process. Messages have frames as over Gloo; on a device they have none.
template <class Body>
void on_ranks(int world_size, Body body, const ExecutionContext& context = {}) {
  auto ends = in_process_group(world_size);
  for (auto& end : ends) {
    if (!context.on_cuda()) end = std::make_unique<FramedTransport>(std::move(end));
  }
  on_ranks(std::move(ends), body, context);
}

}  // namespace dltrain::comm
