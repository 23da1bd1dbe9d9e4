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

// On a device, a stream: ranks that shared one would wait for each other.
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
  std::shared_ptr<cuda::Stream> stream_;  // shared: a build without CUDA has no destructor of it
};

// What runs a rank's calls: the rank itself at once or, on a CUDA device, a queue with a stream of its own.
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
  std::shared_ptr<cuda::Stream> stream_;  // shared: a build without CUDA has no destructor of them
  std::shared_ptr<cuda::StreamQueue> queue_;
};

// Runs body(executor, runner) on world_size ranks, each a thread.
template <class Body>
void on_ranks(int world_size, Body body, const ExecutionContext& context = {}) {
  std::vector<std::thread> threads;
  for (auto& end : in_process_group(world_size)) {
    threads.emplace_back([&body, &context, end = std::move(end)]() mutable {
      Runner runner(context);  // outlives the executor, whose memory its stream gives back
      // As over Gloo; on a device messages travel bare.
      if (!context.on_cuda()) end = std::make_unique<FramedTransport>(std::move(end));
      Executor executor(std::move(end));
      body(executor, runner);
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace dltrain::comm
