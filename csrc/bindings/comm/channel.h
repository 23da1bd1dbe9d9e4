#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "comm/fault/channel.h"

namespace dltrain::bindings {

// Over a ProcessGroupGloo that serves nobody else.
class GlooChannel : public comm::Channel {
 public:
  explicit GlooChannel(c10::intrusive_ptr<c10d::Backend> backend);

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  bool send(int peer, const comm::Notice& notice) noexcept override;
  std::optional<Received> receive() override;
  void close() noexcept override;

 private:
  c10::intrusive_ptr<c10d::Work> post_receive();

  struct Sent {
    comm::Notice notice;
    c10::intrusive_ptr<c10d::Work> work;
  };

  const int rank_, world_size_;
  std::mutex mutex_;  // guards what follows
  c10::intrusive_ptr<c10d::Backend> backend_;
  comm::Notice received_;  // outlives the work that fills it
  c10::intrusive_ptr<c10d::Work> receiving_;
  std::deque<Sent> sent_;  // all of them: Gloo does not tell when one is done. They are few, and only after a failure
};

}  // namespace dltrain::bindings
