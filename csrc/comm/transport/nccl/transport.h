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

// A communicator of one's own, on a stream of its own: a group of messages is one launch, which events order with the context's work.
// Messages travel bare, so ranks that disagree meet their deadline. The first messages between two ranks keep the caller until both have
// come to them; abort() ends that.
class Transport : public comm::Transport, public Grouping, public Health, public Collectives {
 public:
  // Collective. timeout: how long this may last. Throws TransportError.
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

  void all_reduce(const ExecutionContext& context, void* values, int64_t numel, ScalarType number, bool average) override;
  void reduce_scatter(const ExecutionContext& context, float* values, const std::vector<Span>& shards, bool average) override;
  void all_gather(const ExecutionContext& context, float* values, const std::vector<Span>& shards) override;

  std::string error() override;

  // Neither is waited for long: NCCL keeps whoever aborts or destroys until the last graph that has captured its work is gone, and
  // whoever closes in good order until all that was sent has arrived.
  void abort() noexcept override;
  void close() noexcept override;  // in good order: what was sent arrives, also where it has only left this rank

 private:
  struct Taken {
    Comm comm;
    bool alone;  // else somebody is still in it
  };
  Taken take() noexcept;
  template <class Give>
  Event launch(const ExecutionContext& context, Give&& give);
  void check(const char* what, Result result) const;
  template <class End>
  void end(Comm comm, End end) const noexcept;

  const Library& library_;
  const int rank_, world_size_, device_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<cuda::Stream> stream_;  // shared: a build without CUDA has no destructor of it
  std::atomic<bool> aborted_ = false, launches_ = false;
  std::mutex mutex_;                  // NCCL takes one caller at a time
  std::atomic<Comm> comm_ = nullptr;  // null: closed
};

}  // namespace dltrain::comm::nccl
