#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "comm/fault/control_channel.h"

namespace dltrain::bindings {

// Over a ProcessGroupGloo that serves nobody else.
class GlooControlChannel : public comm::ControlChannel {
 public:
  explicit GlooControlChannel(c10::intrusive_ptr<c10d::Backend> backend);

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  bool send(int peer, const comm::ControlMessage& notice) noexcept override;
  std::optional<Received> receive() override;
  void close() noexcept override;

 private:
  c10::intrusive_ptr<c10d::Work> post_receive();

  struct Sent {
    comm::ControlMessage notice;
    c10::intrusive_ptr<c10d::Work> work;
  };

  const int rank_, world_size_;
  std::mutex mutex_;  // guards what follows
  c10::intrusive_ptr<c10d::Backend> backend_;
  comm::ControlMessage received_;  // outlives the work that fills it
  c10::intrusive_ptr<c10d::Work> receiving_;
  std::deque<Sent> sent_;  // all of them: Gloo does not tell when one is done. They are few, and only after a failure
};

}  // namespace dltrain::bindings
