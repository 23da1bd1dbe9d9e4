#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <utility>

#include "comm/transport.h"

namespace dltrain::bindings {

// Point-to-point messages of a torch.distributed backend, e.g. Gloo. The backend must serve nobody else: a failure closes its connections.
class C10dTransport : public comm::Transport {
 public:
  explicit C10dTransport(c10::intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)), rank_(backend_->getRank()), world_size_(backend_->getSize()) {}

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::unique_ptr<comm::Request> send(const Place&, int peer, const void* data, int64_t bytes, int tag = 0) override;
  std::unique_ptr<comm::Request> recv(const Place&, int peer, void* data, int64_t bytes, int tag = 0) override;
  void close() noexcept override;

  // The backend's own all-reduce, in place. Throws TransportError, and when given_up() says so.
  void all_reduce(at::Tensor tensor, comm::Deadline deadline, const std::function<bool()>& given_up);

 private:
  c10d::Backend& backend() const;

  c10::intrusive_ptr<c10d::Backend> backend_;
  c10::intrusive_ptr<c10d::Work> native_;  // the latest
  const int rank_, world_size_;
};

}  // namespace dltrain::bindings
