#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "bindings/comm/gloo/waits.h"
#include "comm/transport/collectives.h"
#include "comm/transport/transport.h"

namespace dltrain::bindings {

// Point-to-point messages of a torch.distributed backend: Gloo's between CPUs, or NCCL's, a group at a time, between CUDA devices. Nothing
// else may use the backend, because a failure closes its connections.
class C10dTransport : public comm::Transport, public comm::Grouping, public comm::Health, public comm::Collectives {
 public:
  C10dTransport(c10::intrusive_ptr<c10d::Backend> backend, const c10::Device& device)
      : backend_(std::move(backend)), device_(device), rank_(backend_->getRank()), world_size_(backend_->getSize()) {
    if (device.is_cpu()) waits_.emplace(backend_);
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::unique_ptr<comm::Request> send(const ExecutionContext& context, int peer, const void* data, int64_t bytes, int tag = 0) override;
  std::unique_ptr<comm::Request> recv(const ExecutionContext& context, int peer, void* data, int64_t bytes, int tag = 0) override;
  std::unique_ptr<comm::Request> exchange(const ExecutionContext& context, const std::vector<comm::P2POp>& ops) override;
  comm::Grouping* grouping() override { return device_.is_cuda() ? this : nullptr; }
  comm::Health* health() override { return device_.is_cuda() ? this : nullptr; }
  comm::Collectives* collectives() override { return device_.is_cuda() ? this : nullptr; }

  void all_reduce(const ExecutionContext& context, void* values, int64_t numel, comm::ScalarType type, bool average) override;
  void reduce_scatter(const ExecutionContext& context, float* values, const std::vector<Span>& shards, bool average) override;
  void all_gather(const ExecutionContext& context, float* values, const std::vector<Span>& shards) override;

  std::string error() override;
  void abort() noexcept override;
  void close() noexcept override;  // on a CUDA device it completes what was sent, unless it was aborted

  // Only on the CPU: the backend's own all-reduce, in place. Throws TransportError when it fails, or when given_up() returns true.
  void all_reduce(at::Tensor tensor, Deadline deadline, const std::function<bool()>& given_up);

 private:
  c10::intrusive_ptr<c10d::Backend> backend() const;
  at::Tensor tensor_at(const void* data, int64_t numel, at::ScalarType type) const;
  std::vector<at::Tensor> bytes_at(const void* data, int64_t bytes) const { return {tensor_at(data, bytes, at::kByte)}; }

  mutable std::mutex mutex_;  // guards backend_
  c10::intrusive_ptr<c10d::Backend> backend_;
  c10::intrusive_ptr<c10d::Work> native_;  // the last all-reduce of the backend's own
  std::atomic<bool> aborted_ = false;
  const c10::Device device_;
  const int rank_, world_size_;
  std::optional<GlooWaits> waits_;  // on the CPU
};

}  // namespace dltrain::bindings
