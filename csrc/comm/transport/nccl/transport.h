#pragma once

#include <atomic>
#include <mutex>

#include "comm/transport/collectives.h"
#include "comm/transport/nccl/library.h"
#include "comm/transport/transport.h"
#include "core/cuda/runtime.h"
#include "core/event.h"

namespace dltrain::comm::nccl {

UniqueId make_unique_id(const Library& library);

// An NCCL communicator with a stream of its own. A group of messages is one launch, which events order with the context's work. Messages
// have no frames, so ranks that disagree fail at their deadline. The first messages between two ranks block the caller until both ranks
// have posted them; abort() ends this.
class Transport : public comm::Transport, public Grouping, public Health, public Collectives {
 public:
  // All ranks must call this. timeout: how long it may take. Throws TransportError.
  Transport(const Library& library, const UniqueId& id, int rank, int world_size, int device, std::chrono::milliseconds timeout);
  ~Transport() override { abort(); }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  Grouping* grouping() override { return this; }
  Health* health() override { return this; }
  Collectives* collectives() override { return this; }

  std::unique_ptr<Request> send(const ExecutionContext& context, int peer, const void* data, int64_t bytes, int tag = 0) override;
  std::unique_ptr<Request> recv(const ExecutionContext& context, int peer, void* data, int64_t bytes, int tag = 0) override;
  std::unique_ptr<Request> exchange(const ExecutionContext& context, const std::vector<P2POp>& ops) override;

  void all_reduce(const ExecutionContext& context, void* values, int64_t numel, ScalarType type, bool average) override;
  void reduce_scatter(const ExecutionContext& context, float* values, const std::vector<Span>& shards, bool average) override;
  void all_gather(const ExecutionContext& context, float* values, const std::vector<Span>& shards) override;

  std::string error() override;

  // Both wait only for a limited time: in NCCL, abort and destroy block until the last CUDA graph that has captured the communicator's work
  // is destroyed, and finalize blocks until all sent messages have arrived.
  void abort() noexcept override;
  void close() noexcept override;  // finalizes: messages that have left this rank still arrive

 private:
  struct Taken {
    Comm comm;
    bool alone;  // false: another thread is still in an NCCL call
  };
  Taken take() noexcept;
  template <class Post>
  Event launch(const ExecutionContext& context, Post&& post);
  void check(const char* what, Result result) const;
  template <class End>
  void end(Comm comm, End end) const noexcept;

  const Library& library_;
  const int rank_, world_size_, device_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<cuda::Stream> stream_;  // shared_ptr because a build without CUDA has no destructor of Stream
  std::atomic<bool> aborted_ = false, launches_ = false;
  std::mutex mutex_;                  // NCCL allows one caller at a time
  std::atomic<Comm> comm_ = nullptr;  // null after abort or close
};

}  // namespace dltrain::comm::nccl
