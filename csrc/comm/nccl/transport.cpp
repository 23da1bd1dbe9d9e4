#include "comm/nccl/transport.h"

#include <algorithm>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "core/check.h"

namespace dltrain::comm::nccl {

namespace {

class Launched : public Request {
 public:
  Launched(const Place& place, Event done) : place_(place), done_(std::move(done)) {}
  void wait(Deadline) override { done_.wait(place_); }
  void abort() override {}  // the transport's does it

 private:
  Place place_;
  Event done_;
};

DataType type_of(Number number) {
  switch (number) {
    case Number::int8: return int8;
    case Number::uint8: return uint8;
    case Number::int32: return int32;
    case Number::int64: return int64;
    case Number::fp16: return fp16;
    case Number::bf16: return bf16;
    case Number::fp32: return fp32;
    case Number::fp64: return fp64;
  }
  throw std::invalid_argument("number: expected one of those that NCCL knows");
}

// As NCCL wants them: side by side, and as long as each other.
bool are_equal(const std::vector<Span>& shares) {
  for (const Span& share : shares) {
    if (share.count != shares[0].count || share.first != (&share - shares.data()) * share.count) return false;
  }
  return true;
}

// NCCL takes what the current device is for the communicator's.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if constexpr (built_with_cuda) {
      if (device >= 0) guard_ = std::make_shared<cuda::DeviceGuard>(device);
    }
  }

 private:
  std::shared_ptr<cuda::DeviceGuard> guard_;  // shared: a build without CUDA has no destructor of it
};

constexpr auto patience = std::chrono::microseconds(200);          // with NCCL, before a thread sleeps: that takes longer than a launch
constexpr auto most_for_an_end = std::chrono::milliseconds(2000);  // that whoever closes waits

// All messages have left, or arrived. Ranks of one host are to do this together, and whoever is alone in it may wait for nothing.
bool finalize(const Library& library, Comm comm, std::chrono::milliseconds timeout) {
  const auto end = Clock::now() + timeout;
  Result result = library->comm_finalize(comm);
  while (result == in_progress && Clock::now() < end) {
    std::this_thread::sleep_for(patience);
    if (library->comm_get_async_error(comm, &result) != success) return false;
  }
  return result == success;
}

// Returns when `end` has, or has not in that time: then it goes on by itself.
template <class End>
void in_time(std::chrono::milliseconds timeout, End end) noexcept {
  try {
    const auto ended = std::make_shared<std::promise<void>>();
    const auto future = ended->get_future();
    std::thread thread([ended, end] {
      end();
      ended->set_value();
    });
    future.wait_for(timeout) == std::future_status::ready ? thread.join() : thread.detach();
  } catch (const std::exception&) {
    end();  // there was no thread
  }
}

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
  Config config;
  try {
    settle("ncclCommInitRankConfig", library->comm_init_rank_config(&comm_, world_size, id, rank, &config));
  } catch (...) {
    abort();
    throw;
  }
}

std::unique_ptr<Request> Transport::send(const Place& place, int peer, const void* data, int64_t bytes, int) {
  return exchange(place, {{true, peer, const_cast<void*>(data), bytes}});
}

std::unique_ptr<Request> Transport::recv(const Place& place, int peer, void* data, int64_t bytes, int) {
  return exchange(place, {{false, peer, data, bytes}});
}

std::unique_ptr<Request> Transport::exchange(const Place& place, const std::vector<Posting>& postings) {
  return std::make_unique<Launched>(place, launch(place, [&](CUstream_st* stream) {
                                      for (const Posting& each : postings) {
                                        const auto bytes = static_cast<size_t>(each.bytes);
                                        each.sent ? check("ncclSend", library_->send(each.data, bytes, uint8, each.peer, comm_, stream))
                                                  : check("ncclRecv", library_->recv(each.data, bytes, uint8, each.peer, comm_, stream));
                                      }
                                    }));
}

void Transport::all_reduce(const Place& place, void* values, int64_t numel, Number number, bool average) {
  launch(place, [&](CUstream_st* stream) {
    check("ncclAllReduce",
          library_->all_reduce(values, values, static_cast<size_t>(numel), type_of(number), average ? avg : sum, comm_, stream));
  }).wait(place);
}

void Transport::reduce_scatter(const Place& place, float* values, const std::vector<Span>& shares, bool average) {
  const RedOp op = average ? avg : sum;
  launch(place, [&](CUstream_st* stream) {
    if (are_equal(shares)) {
      const auto count = static_cast<size_t>(shares[rank_].count);
      check("ncclReduceScatter", library_->reduce_scatter(values, values + shares[rank_].first, count, fp32, op, comm_, stream));
      return;
    }
    for (int root = 0; root < world_size_; ++root) {
      if (shares[root].count == 0) continue;
      float* const share = values + shares[root].first;
      check("ncclReduce", library_->reduce(share, share, static_cast<size_t>(shares[root].count), fp32, op, root, comm_, stream));
    }
  }).wait(place);
}

void Transport::all_gather(const Place& place, float* values, const std::vector<Span>& shares) {
  launch(place, [&](CUstream_st* stream) {
    if (are_equal(shares)) {
      const auto count = static_cast<size_t>(shares[rank_].count);
      check("ncclAllGather", library_->all_gather(values + shares[rank_].first, values, count, fp32, comm_, stream));
      return;
    }
    for (int root = 0; root < world_size_; ++root) {
      if (shares[root].count == 0) continue;
      float* const share = values + shares[root].first;
      check("ncclBroadcast", library_->broadcast(share, share, static_cast<size_t>(shares[root].count), fp32, root, comm_, stream));
    }
  }).wait(place);
}

// One grouped launch of what `give` gives, after the place's work so far.
template <class Give>
Event Transport::launch(const Place& place, Give&& give) {
  const std::lock_guard lock(mutex_);
  if (!comm_ || aborted_) throw TransportError("the connections were closed");
  const OnDevice guard(device_);
  Place mine = place;
  if constexpr (built_with_cuda) {
    if (stream_) mine = stream_->place();
  }
  Event::record(place).wait(mine);
  check("ncclGroupStart", library_->group_start());
  std::optional<TransportError> error;  // a group that was begun has to be ended
  try {
    give(mine.stream);
  } catch (const TransportError& caught) {
    error = caught;
  }
  const Result result = library_->group_end();
  if (error) throw *error;
  settle("ncclGroupEnd", result);
  return Event::record(mine);
}

void Transport::check(const char* what, Result result) {
  if (result == success || result == in_progress) return;
  throw TransportError(text("NCCL ", library_.version_text(), ": ", library_.describe(what, result, comm_)));
}

// Without blocking, NCCL goes on with what it was given in a thread of its own; until it is done it takes nothing more.
void Transport::settle(const char* what, Result result) {
  const auto start = Clock::now();
  while (result == in_progress) {
    if (aborted_) throw TransportError("aborted");
    const auto now = Clock::now();
    if (now > start + timeout_) throw TransportError(text(what, ": not done in ", std::chrono::duration<double>(timeout_).count(), " s"));
    now < start + patience ? std::this_thread::yield() : std::this_thread::sleep_for(patience);
    check("ncclCommGetAsyncError", library_->comm_get_async_error(comm_, &result));
  }
  check(what, result);
}

std::string Transport::error() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !comm_) return {};  // whoever has it is told himself
  Result result = success;
  const Result asked = library_->comm_get_async_error(comm_, &result);
  if (asked != success) result = asked;
  return result == success || result == in_progress
             ? ""
             : text("NCCL ", library_.version_text(), ": ", library_.describe("in the background", result, comm_));
}

// Nobody else gives it anything from now on. Who has the mutex for long is blocked in NCCL, and is to be ended.
Comm Transport::take() noexcept {
  std::unique_lock lock(mutex_, std::defer_lock);
  for (const auto end = Clock::now() + std::chrono::seconds(1); !lock.try_lock() && Clock::now() < end;) {
    std::this_thread::sleep_for(patience);
  }
  return std::exchange(comm_, nullptr);
}

void Transport::abort() noexcept {
  aborted_ = true;
  const Comm comm = take();
  if (!comm) return;
  in_time(std::min(timeout_, most_for_an_end), [&library = library_, comm, device = device_] {
    const OnDevice guard(device);
    library->comm_abort(comm);
  });
}

void Transport::close() noexcept {
  const bool in_good_order = !aborted_;
  aborted_ = true;
  const Comm comm = take();
  if (!comm) return;
  const auto timeout = std::min(timeout_, most_for_an_end);
  in_time(2 * timeout, [&library = library_, comm, device = device_, timeout, in_good_order] {
    const OnDevice guard(device);
    in_good_order&& finalize(library, comm, timeout) ? library->comm_destroy(comm) : library->comm_abort(comm);
  });
}

}  // namespace dltrain::comm::nccl
