#include "comm/transport/nccl/transport.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/in_time.h"

namespace dltrain::comm::nccl {

namespace {

class Launched : public Request {
 public:
  Launched(const ExecutionContext& context, Event done) : context_(context), done_(std::move(done)) {}
  void wait(Deadline) override { done_.wait(context_); }
  void abort() override {}  // Transport::abort ends all messages

 private:
  ExecutionContext context_;
  Event done_;
};

DataType type_of(ScalarType type) {
  switch (type) {
    case ScalarType::int8: return int8;
    case ScalarType::uint8: return uint8;
    case ScalarType::int32: return int32;
    case ScalarType::int64: return int64;
    case ScalarType::fp16: return fp16;
    case ScalarType::bf16: return bf16;
    case ScalarType::fp32: return fp32;
    case ScalarType::fp64: return fp64;
  }
  throw std::invalid_argument("type: expected an element type that NCCL supports");
}

// Whether the shards are adjacent and have the same length, as NCCL's collectives need it.
bool are_equal(const std::vector<Span>& shards) {
  for (const Span& shard : shards) {
    if (shard.count != shards[0].count || shard.first != (&shard - shards.data()) * shard.count) return false;
  }
  return true;
}

// NCCL assumes that the current device is the communicator's device.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if constexpr (built_with_cuda) {
      if (device >= 0) guard_ = std::make_shared<cuda::DeviceGuard>(device, std::nothrow);  // NCCL reports a faulty device itself
    }
  }

 private:
  std::shared_ptr<cuda::DeviceGuard> guard_;  // shared_ptr because a build without CUDA has no destructor of DeviceGuard
};

constexpr auto end_timeout = std::chrono::milliseconds(2000);  // for NCCL to end the communicator
// How long abort and close wait for a thread that is in an NCCL call: posting messages is short, but launching them may never end.
constexpr auto post_timeout = std::chrono::milliseconds(1000), launch_timeout = std::chrono::milliseconds(50);

struct Initialised {
  Result result;
  Comm comm;
};

}  // namespace

UniqueId make_unique_id(const Library& library) {
  UniqueId id;
  const Result result = library->get_unique_id(&id);
  if (result != success) throw TransportError(text("NCCL ", library.version_text(), ": ", library.describe("ncclGetUniqueId", result)));
  return id;
}

Transport::Transport(const Library& library, const UniqueId& id, int rank, int world_size, int device, std::chrono::milliseconds timeout)
    : library_(library), rank_(rank), world_size_(world_size), device_(device), timeout_(timeout) {
  const OnDevice guard(device);
  if constexpr (built_with_cuda) {
    if (device >= 0) stream_ = std::make_shared<cuda::Stream>(device);
  }
  constexpr const char* what = "ncclCommInitRankConfig";
  const auto initialise = [&library, id, rank, world_size, device] {
    const OnDevice guard(device);
    Config config;
    Comm comm = nullptr;
    const Result result = library->comm_init_rank_config(&comm, world_size, id, rank, &config);
    return Initialised{result, comm};
  };
  const auto found = in_time(timeout, initialise, [&library, device](const Initialised& too_late) {
    const OnDevice guard(device);
    if (too_late.result == success) library->comm_abort(too_late.comm);
  });
  if (!found) throw TransportError(text(what, ": not done in ", std::chrono::duration<double>(timeout).count(), " s"));
  check(what, found->result);
  comm_ = found->comm;
}

std::unique_ptr<Request> Transport::send(const ExecutionContext& context, int peer, const void* data, int64_t bytes, int) {
  return exchange(context, {{true, peer, const_cast<void*>(data), bytes}});
}

std::unique_ptr<Request> Transport::recv(const ExecutionContext& context, int peer, void* data, int64_t bytes, int) {
  return exchange(context, {{false, peer, data, bytes}});
}

std::unique_ptr<Request> Transport::exchange(const ExecutionContext& context, const std::vector<P2POp>& ops) {
  return std::make_unique<Launched>(context, launch(context, [&](CUstream_st* stream) {
                                      for (const P2POp& each : ops) {
                                        const auto bytes = static_cast<size_t>(each.bytes);
                                        each.sent ? check("ncclSend", library_->send(each.data, bytes, uint8, each.peer, comm_, stream))
                                                  : check("ncclRecv", library_->recv(each.data, bytes, uint8, each.peer, comm_, stream));
                                      }
                                    }));
}

void Transport::all_reduce(const ExecutionContext& context, void* values, int64_t numel, ScalarType type, bool average) {
  launch(context, [&](CUstream_st* stream) {
    check("ncclAllReduce",
          library_->all_reduce(values, values, static_cast<size_t>(numel), type_of(type), average ? avg : sum, comm_, stream));
  }).wait(context);
}

void Transport::reduce_scatter(const ExecutionContext& context, float* values, const std::vector<Span>& shards, bool average) {
  const RedOp op = average ? avg : sum;
  launch(context, [&](CUstream_st* stream) {
    if (are_equal(shards)) {
      const auto count = static_cast<size_t>(shards[rank_].count);
      check("ncclReduceScatter", library_->reduce_scatter(values, values + shards[rank_].first, count, fp32, op, comm_, stream));
      return;
    }
    for (int root = 0; root < world_size_; ++root) {
      if (shards[root].count == 0) continue;
      float* const shard = values + shards[root].first;
      check("ncclReduce", library_->reduce(shard, shard, static_cast<size_t>(shards[root].count), fp32, op, root, comm_, stream));
    }
  }).wait(context);
}

void Transport::all_gather(const ExecutionContext& context, float* values, const std::vector<Span>& shards) {
  launch(context, [&](CUstream_st* stream) {
    if (are_equal(shards)) {
      const auto count = static_cast<size_t>(shards[rank_].count);
      check("ncclAllGather", library_->all_gather(values + shards[rank_].first, values, count, fp32, comm_, stream));
      return;
    }
    for (int root = 0; root < world_size_; ++root) {
      if (shards[root].count == 0) continue;
      float* const shard = values + shards[root].first;
      check("ncclBroadcast", library_->broadcast(shard, shard, static_cast<size_t>(shards[root].count), fp32, root, comm_, stream));
    }
  }).wait(context);
}

// Launches the messages that `post` posts as one group, after the context's previous work. Events may block the host, so they are recorded
// and waited for without the mutex.
template <class Post>
Event Transport::launch(const ExecutionContext& context, Post&& post) {
  const OnDevice guard(device_);
  ExecutionContext mine = context;
  if constexpr (built_with_cuda) {
    if (stream_) mine = stream_->context();
  }
  Event::record(context).wait(mine);
  {
    const std::lock_guard lock(mutex_);
    if (!comm_ || aborted_) throw TransportError("the connections were closed");
    check("ncclGroupStart", library_->group_start());
    std::optional<TransportError> error;  // kept, because a group that has begun must be ended
    try {
      post(mine.stream);
    } catch (const TransportError& caught) {
      error = caught;
    }
    launches_ = true;
    const Result result = library_->group_end();
    launches_ = false;
    if (aborted_) throw TransportError("aborted");  // the communicator may not exist any more
    if (error) throw *error;
    check("ncclGroupEnd", result);
  }
  return Event::record(mine);
}

void Transport::check(const char* what, Result result) const {
  if (result != success) throw TransportError(text("NCCL ", library_.version_text(), ": ", library_.describe(what, result, comm_)));
}

std::string Transport::error() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  const Comm comm = comm_;
  if (!lock || !comm) return {};  // the thread that has the mutex gets the error from its own NCCL call
  Result result = success;
  const Result asked = library_->comm_get_async_error(comm, &result);
  if (asked != success) result = asked;
  return result == success ? "" : text("NCCL ", library_.version_text(), ": ", library_.describe("in the background", result, comm));
}

// Takes the communicator, so that no other thread uses it from now on. A thread that stays in an NCCL call waits for a peer, and is not
// waited for: ending the communicator ends its call.
Transport::Taken Transport::take() noexcept {
  std::unique_lock lock(mutex_, std::defer_lock);
  for (const auto start = Clock::now(); !lock.try_lock();) {
    if (Clock::now() > start + (launches_ ? launch_timeout : post_timeout)) break;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return {comm_.exchange(nullptr), lock.owns_lock()};
}

void Transport::abort() noexcept {
  aborted_ = true;
  end(take().comm, [&library = library_](Comm comm) { library->comm_abort(comm); });
}

// The ranks of a host must call this together.
void Transport::close() noexcept {
  const bool in_good_order = !aborted_.exchange(true);
  const Taken taken = take();
  end(taken.comm, [&library = library_, in_good_order = in_good_order && taken.alone](Comm comm) {
    in_good_order && library->comm_finalize(comm) == success ? library->comm_destroy(comm) : library->comm_abort(comm);
  });
}

template <class End>
void Transport::end(Comm comm, End end) const noexcept {
  if (!comm) return;
  const auto ended = [comm, end, device = device_] {
    const OnDevice guard(device);
    end(comm);
    return true;
  };
  in_time(std::min(timeout_, end_timeout), ended, [](bool) {});
}

}  // namespace dltrain::comm::nccl
