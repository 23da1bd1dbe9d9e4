#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "comm/transport/shm/group.h"
#include "comm/transport/transport.h"

namespace dltrain::comm::shm {

// Sends messages through memory that the processes of a host share, each behind a header that says to which call it belongs. While one
// message is waited for, all of them make progress. Messages between two ranks have one order, whatever their tag. Only for CPU memory.
class Transport : public comm::Transport, public Framing {
 public:
  // is_alive: says whether the process of a rank has not ended.
  Transport(std::shared_ptr<Group> group, int rank, std::function<bool(int rank)> is_alive);
  ~Transport() override;

  int rank() const override { return rank_; }
  int world_size() const override { return group_->world_size(); }
  std::unique_ptr<Request> send(const ExecutionContext& context, int peer, const void* data, int64_t bytes, int tag = 0) override;
  std::unique_ptr<Request> recv(const ExecutionContext& context, int peer, void* data, int64_t bytes, int tag = 0) override;
  std::unique_ptr<Request> recv_in_place(const ExecutionContext& context, int peer, void* data, int64_t bytes) override;
  void close() noexcept override;
  int64_t segment_bytes() const override;
  Framing* framing() override { return this; }

  void begin(const Call& call) override { call_ = call; }
  std::string last_words(int peer) override;

 private:
  class Message;
  class Sent;
  class Received;
  struct Peer;

  // Moves what can be moved at once, from and to one rank or all. Return whether anything has changed.
  bool progress(int rank);
  bool progress();
  void wait(const Message& message, Deadline deadline);
  void abort();

  const std::shared_ptr<Group> group_;
  const int rank_;
  const int process_;  // this one; a fork of it is no rank
  std::function<bool(int)> is_alive_;
  Call call_;
  std::map<int, Peer> peers_;  // the other ranks
  std::atomic<bool> aborted_ = false;
};

}  // namespace dltrain::comm::shm
