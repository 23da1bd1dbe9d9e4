#include "bindings/comm/c10d_transport.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "bindings/comm/gloo/unobserved.h"
#include "bindings/execution_context.h"
#include "core/in_time.h"

namespace dltrain::bindings {

namespace {

// Runs a call into c10d, and turns every exception into a TransportError with the first line of its text.
template <class Call>
auto guarded(Call&& call) {
  const auto first_line = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  try {
    return call();
  } catch (const comm::TransportError&) {
    throw;
  } catch (const c10::Error& error) {
    throw comm::TransportError(first_line(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    throw comm::TransportError(first_line(error.what()));
  }
}

// The time until the deadline, at least 1 ms: for c10d a timeout of zero means no timeout.
std::chrono::milliseconds until(Deadline deadline) {
  return std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()), std::chrono::milliseconds(1));
}

class GlooRequest : public comm::Request {
 public:
  GlooRequest(GlooWaits& waits, int peer, c10::intrusive_ptr<c10d::Work> work) : waits_(waits), peer_(peer), work_(std::move(work)) {}

  void wait(Deadline deadline) override {
    guarded([&] {
      if (!waits_.wait(peer_, *work_, until(deadline))) throw comm::TransportError("aborted");
    });
  }

  void abort() override { work_->abort(); }

 private:
  GlooWaits& waits_;
  const int peer_;
  c10::intrusive_ptr<c10d::Work> work_;
};

// A request on a CUDA device. A wait without a timeout only makes the current stream wait, and not the host.
class EnqueuedRequest : public comm::Request {
 public:
  EnqueuedRequest(const ExecutionContext& context, c10::intrusive_ptr<c10d::Work> work) : context_(context), work_(std::move(work)) {}

  void wait(Deadline) override {
    const OnStream current(context_);
    guarded([&] { work_->wait(); });
  }
  void abort() override {}  // C10dTransport::abort aborts all requests

 private:
  const ExecutionContext context_;
  c10::intrusive_ptr<c10d::Work> work_;
};

at::ScalarType type_of(comm::ScalarType type) {
  switch (type) {
    case comm::ScalarType::int8: return at::kChar;
    case comm::ScalarType::uint8: return at::kByte;
    case comm::ScalarType::int32: return at::kInt;
    case comm::ScalarType::int64: return at::kLong;
    case comm::ScalarType::fp16: return at::kHalf;
    case comm::ScalarType::bf16: return at::kBFloat16;
    case comm::ScalarType::fp64: return at::kDouble;
    case comm::ScalarType::fp32: break;
  }
  return at::kFloat;
}

// Closes the backend after everything that was sent has arrived. If that takes longer than the timeout, it goes on in another thread.
void shut_down(const c10::intrusive_ptr<c10d::Backend>& backend, std::chrono::milliseconds timeout) noexcept {
  const auto shut_down = [backend] {
    try {
      backend->shutdown();
    } catch (const std::exception&) {
      return false;
    }
    return true;
  };
  in_time(timeout, shut_down, [](bool) {});
}

c10d::ReduceOp op_of(bool average) { return average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM; }

// Whether the shards are adjacent and of equal length, as the backends' collectives require.
bool are_equal(const std::vector<Span>& shards) {
  return std::all_of(shards.begin(), shards.end(), [&](const Span& shard) {
    return shard.count == shards[0].count && shard.first == (&shard - shards.data()) * shard.count;
  });
}

}  // namespace

std::unique_ptr<comm::Request> C10dTransport::send(const ExecutionContext& context, int peer, const void* data, int64_t bytes, int tag) {
  if (device_.is_cuda()) return exchange(context, {{true, peer, const_cast<void*>(data), bytes}});
  auto tensors = bytes_at(data, bytes);
  const Unobserved unobserved;
  return guarded([&] { return std::make_unique<GlooRequest>(*waits_, peer, backend()->send(tensors, peer, tag)); });
}

std::unique_ptr<comm::Request> C10dTransport::recv(const ExecutionContext& context, int peer, void* data, int64_t bytes, int tag) {
  if (device_.is_cuda()) return exchange(context, {{false, peer, data, bytes}});
  auto tensors = bytes_at(data, bytes);
  const Unobserved unobserved;
  return guarded([&] { return std::make_unique<GlooRequest>(*waits_, peer, backend()->recv(tensors, peer, tag)); });
}

std::unique_ptr<comm::Request> C10dTransport::exchange(const ExecutionContext& context, const std::vector<comm::P2POp>& ops) {
  const OnStream current(context);
  return guarded([&] {
    backend()->startCoalescing();
    std::exception_ptr error;  // endCoalescing has to be called also after an error
    try {
      for (const comm::P2POp& each : ops) {
        auto tensors = bytes_at(each.data, each.bytes);
        each.sent ? backend()->send(tensors, each.peer, 0) : backend()->recv(tensors, each.peer, 0);
      }
    } catch (...) {
      error = std::current_exception();
    }
    auto work = backend()->endCoalescing();
    if (error) std::rethrow_exception(error);
    return std::make_unique<EnqueuedRequest>(context, std::move(work));
  });
}

void C10dTransport::all_reduce(const ExecutionContext& context, void* values, int64_t numel, comm::ScalarType type, bool average) {
  const OnStream current(context);
  guarded([&] {
    std::vector<at::Tensor> tensors = {tensor_at(values, numel, type_of(type))};
    c10d::AllreduceOptions options;
    options.reduceOp = op_of(average);
    backend()->allreduce(tensors, options)->wait();
  });
}

void C10dTransport::reduce_scatter(const ExecutionContext& context, float* values, const std::vector<Span>& shards, bool average) {
  const OnStream current(context);
  guarded([&] {
    const auto tensor_of = [&](const Span& shard) { return tensor_at(values + shard.first, shard.count, at::kFloat); };
    if (are_equal(shards)) {
      auto all = tensor_at(values, shards.back().first + shards.back().count, at::kFloat), mine = tensor_of(shards[rank_]);
      c10d::ReduceScatterOptions options;
      options.reduceOp = op_of(average);
      backend()->_reduce_scatter_base(mine, all, options)->wait();
      return;
    }
    for (int root = 0; root < world_size_; ++root) {
      std::vector<at::Tensor> tensors = {tensor_of(shards[root])};
      if (tensors[0].numel() == 0) continue;
      c10d::ReduceOptions options;
      options.reduceOp = op_of(average);
      options.rootRank = root;
      backend()->reduce(tensors, options)->wait();
    }
  });
}

void C10dTransport::all_gather(const ExecutionContext& context, float* values, const std::vector<Span>& shards) {
  const OnStream current(context);
  guarded([&] {
    const auto tensor_of = [&](const Span& shard) { return tensor_at(values + shard.first, shard.count, at::kFloat); };
    if (are_equal(shards)) {
      auto all = tensor_at(values, shards.back().first + shards.back().count, at::kFloat), mine = tensor_of(shards[rank_]);
      backend()->_allgather_base(all, mine)->wait();
      return;
    }
    for (int root = 0; root < world_size_; ++root) {
      std::vector<at::Tensor> tensors = {tensor_of(shards[root])};
      if (tensors[0].numel() == 0) continue;
      c10d::BroadcastOptions options;
      options.rootRank = root;
      backend()->broadcast(tensors, options)->wait();
    }
  });
}

void C10dTransport::all_reduce(at::Tensor tensor, Deadline deadline, const std::function<bool()>& given_up) {
  constexpr auto slice = std::chrono::milliseconds(50);
  std::vector<at::Tensor> tensors = {std::move(tensor)};
  guarded([&] {
    c10d::AllreduceOptions options;
    options.timeout = until(deadline);
    native_ = backend()->allreduce(tensors, options);
    while (!native_->isCompleted()) {
      if (given_up()) throw comm::TransportError("given up");
      if (Clock::now() > deadline + slice) throw comm::TransportError("nothing came");
      const bool has_broken = waits_->any_has_broken();
      try {
        native_->wait(slice);
      } catch (const std::exception&) {
        if (has_broken && !native_->isCompleted()) throw comm::TransportError("a connection broke in the middle of it");
        continue;  // the slice has timed out, or the work has failed: then the wait after the loop throws
      }
    }
    native_->wait();
  });
}

std::string C10dTransport::error() {
  return guarded([&]() -> std::string {
    switch (backend()->getError()) {
      case c10d::ErrorType::SUCCESS: return {};
      case c10d::ErrorType::TIMEOUT: return "the backend has timed out";
      case c10d::ErrorType::REMOTE_ERROR: return "a peer's connections have failed";
      default: return "the backend's connections have failed";
    }
  });
}

void C10dTransport::abort() noexcept {
  if (!device_.is_cuda()) return;
  aborted_ = true;
  try {
    backend()->abort();
  } catch (const std::exception&) {
    return;  // the backend has ended already
  }
}

void C10dTransport::close() noexcept {
  constexpr auto timeout = std::chrono::milliseconds(2000);
  std::unique_lock lock(mutex_);
  auto backend = std::move(backend_);
  lock.unlock();
  if (waits_) waits_->close();
  if (device_.is_cuda() && backend && !aborted_.exchange(true)) shut_down(backend, timeout);
  // Gloo cannot cancel the work, so another thread destroys the backend when the work has ended.
  if (native_ && !native_->isCompleted()) std::thread([backend = std::move(backend)]() mutable { backend.reset(); }).detach();
}

// The caller shares the ownership, because another thread may call close().
c10::intrusive_ptr<c10d::Backend> C10dTransport::backend() const {
  std::lock_guard lock(mutex_);
  if (!backend_) throw comm::TransportError("the connections were closed");
  return backend_;
}

at::Tensor C10dTransport::tensor_at(const void* data, int64_t numel, at::ScalarType type) const {
  return at::from_blob(const_cast<void*>(data), {numel}, at::TensorOptions(type).device(device_));
}

}  // namespace dltrain::bindings
