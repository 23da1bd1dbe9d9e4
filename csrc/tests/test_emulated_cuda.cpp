// Tests what the emulated device checks more strictly than a real one: contexts on other devices, and what a captured graph forbids.

#ifdef DLTRAIN_EMULATED

#include <cuda_runtime.h>

#include <cmath>
#include <latch>
#include <memory>

#include "comm/fault/failure.h"
#include "tests/comm/nccl_ranks.h"

namespace dltrain::comm::nccl {
namespace {

class Graph {
 public:
  // Captures the work that give() enqueues on the context's stream.
  template <class Give>
  Graph(const ExecutionContext& context, Give give) : context_(context) {
    const cuda::DeviceGuard guard(context.device);
    cudaStreamBeginCapture(context.stream, cudaStreamCaptureModeGlobal);
    give();
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(context.stream, &graph), cudaSuccess);
    cudaGraphInstantiate(&executable_, graph, 0);
  }
  ~Graph() {
    const cuda::DeviceGuard guard(context_.device);
    Event::record(context_).synchronize();
    cudaGraphExecDestroy(executable_);
  }

  void replay() const {
    const cuda::DeviceGuard guard(context_.device);
    cudaGraphLaunch(executable_, context_.stream);
  }

 private:
  const ExecutionContext context_;
  cudaGraphExec_t executable_ = nullptr;
};

// A context takes about half a gigabyte of a device. On a host with several devices, the threads of a rank may make one only on the rank's
// device, though device 0 is current at their start. All tests work on the last device; this check follows them.
class OnlyOnTheDeviceInUse : public testing::Environment {
 public:
  void TearDown() override { EXPECT_FALSE(emulated_cuda::has_context[0]) << "something was asked of CUDA without a guard"; }
};

[[maybe_unused]] const auto* const registered = testing::AddGlobalTestEnvironment(new OnlyOnTheDeviceInUse);

TEST(Contexts, AGuardRestoresOnlyADeviceThatHasAContext) {
  std::thread fresh([] {
    int device = 0;
    const bool before = emulated_cuda::has_context[0].exchange(false);
    {
      const cuda::DeviceGuard guard(1);
    }
    cudaGetDevice(&device);
    EXPECT_EQ(device, 1);
    emulated_cuda::has_context[0] = true;
    emulated_cuda::current = 0;
    {
      const cuda::DeviceGuard guard(1);
    }
    cudaGetDevice(&device);
    EXPECT_EQ(device, 0);
    emulated_cuda::has_context[0] = before;
  });
  fresh.join();
}

using Values = std::vector<float>;

class GraphsOn : public OverNccl {};
INSTANTIATE_TEST_SUITE_P(Contexts, GraphsOn, testing::Values("cuda"), [](const auto& info) { return info.param; });

TEST_P(GraphsOn, ReplayAnAllReduce) {
  constexpr int world_size = 3;
  on_nccl_ranks(context(), world_size, [](Executor& executor, Runner& runner, const ExecutionContext& context) {
    cuda::stay_out_of_captures(context.device);  // of those of the other ranks, which are threads of this process
    CallOptions call;
    call.algorithm = "direct";
    call.codec = "int8";
    const Array<float> array(context, Values(1000, 127.0f));
    const auto reduce = [&] { runner.run(executor, {array.data()}, 1000, call); };
    reduce();  // connects, and allocates what cannot be allocated in a capture
    float now = 127.0f * world_size;
    EXPECT_EQ(array.values(), Values(1000, now));
    const Graph graph(context, reduce);
    EXPECT_EQ(array.values(), Values(1000, now));  // nothing has run
    for (int replay = 0; replay < 3; ++replay) {
      graph.replay();
      now *= world_size;
      const Values values = array.values();
      for (const float value : values) ASSERT_NEAR(value, now, now * 0.01f);
    }
    reduce();  // a call outside of the graph still works
    EXPECT_NEAR(array.values()[0], now * world_size, now * 0.1f);
  });
}

// The watchdog of another rank queries its events while this rank captures, and must not disturb the capture.
TEST_P(GraphsOn, ACaptureIsNotDisturbedByPendingCalls) {
  std::latch captured(1), begun(1);
  on_nccl_ranks(context(), 2, [&](Executor& executor, Runner& runner, const ExecutionContext& context) {
    const Array<float> array(context, Values(100, 1.0f));
    CallOptions call;
    call.algorithm = "direct";
    runner.run(executor, {array.data()}, 100, call);
    array.values();
    if (executor.rank() == 1) {
      begun.wait();
      const Graph graph(context, [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
      captured.count_down();
      runner.run(executor, {array.data()}, 100, call);
    } else {
      runner.run(executor, {array.data()}, 100, call);  // pending until rank 1 has captured
      begun.count_down();
      captured.wait();
    }
    EXPECT_EQ(array.values(), Values(100, 4.0f));
    executor.drain();
    EXPECT_EQ(executor.failure(), "");
  });
}

// A replay has no deadline, but a call that is captured before its peers are connected waits for them on the host.
TEST_P(GraphsOn, AFirstCallHasADeadlineAlsoInACapture) {
  std::latch over(1);
  on_nccl_ranks(context(), 2, [&](Executor& executor, Runner& runner, const ExecutionContext& context) {
    if (executor.rank() == 1) return over.wait();
    cuda::stay_out_of_captures(context.device);
    const Array<float> array(context, Values(100, 1.0f));
    CallOptions call;
    call.algorithm = "direct";
    call.timeout = std::chrono::milliseconds(300);
    const cuda::DeviceGuard guard(context.device);
    cudaStreamBeginCapture(context.stream, cudaStreamCaptureModeGlobal);
    const auto reduce = [&] { runner.run(executor, {array.data()}, 100, call); };
    expect_in("waiting for rank 1 in round 0 of 2 failed after", error_of<CollectiveError>(reduce));
    cudaGraph_t graph = nullptr;
    EXPECT_NE(cudaStreamEndCapture(context.stream, &graph), cudaSuccess);  // the work of the call has not been joined to the stream
    over.count_down();
  });
}

TEST_P(GraphsOn, KeepTheMemoryOfAFailure) {
  const OwnContext own(context());
  const ExecutionContext context = own.context();
  const Array<float> array(context, Values(10, 1.0f));
  auto failure = std::make_unique<Failure>();
  failure->poison(context, {array.data()}, 10);
  array.values();
  const Graph graph(context, [&] {
    failure->poison(context, {array.data()}, 10);
    failure->captured();
  });
  failure->set("the executor was destroyed");
  failure.reset();
  graph.replay();
  for (const float value : array.values()) EXPECT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace dltrain::comm::nccl

#endif
