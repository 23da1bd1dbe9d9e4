#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/transport.h"

namespace dltrain::bindings {

// Point-to-point messages of a torch.distributed backend, e.g. Gloo. The backend must serve nobody else: a failure closes its connections.
class C10dTransport : public comm::Transport {
 public:
  explicit C10dTransport(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  int rank() const override { return backend_->getRank(); }
  int world_size() const override { return backend_->getSize(); }
  std::unique_ptr<comm::Request> send(const Place&, int peer, const void* data, int64_t bytes, int tag = 0) override;
  std::unique_ptr<comm::Request> recv(const Place&, int peer, void* data, int64_t bytes, int tag = 0) override;

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace dltrain::bindings
