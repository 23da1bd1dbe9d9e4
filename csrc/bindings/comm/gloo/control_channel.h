#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "comm/fault/control_channel.h"

namespace dltrain::bindings {

// The control channel over a ProcessGroupGloo that nothing else uses.
class GlooControlChannel : public comm::ControlChannel {
 public:
  explicit GlooControlChannel(c10::intrusive_ptr<c10d::Backend> backend);

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  bool send(int peer, const comm::ControlMessage& message) noexcept override;
  std::optional<Received> receive() override;
  void close() noexcept override;

 private:
  c10::intrusive_ptr<c10d::Work> post_receive();

  struct Sent {
    comm::ControlMessage message;
    c10::intrusive_ptr<c10d::Work> work;
  };

  const int rank_, world_size_;
  std::mutex mutex_;  // guards the members below
  c10::intrusive_ptr<c10d::Backend> backend_;
  comm::ControlMessage received_;  // must outlive the work that writes it
  c10::intrusive_ptr<c10d::Work> receiving_;
  std::deque<Sent> sent_;  // all of them, since Gloo does not report when one is done; few, and only after a failure
};

}  // namespace dltrain::bindings
