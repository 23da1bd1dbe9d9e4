#include "comm/transport/in_process.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>

#include "core/check.h"
#include "core/event.h"
#include "core/memory.h"

namespace dltrain::comm {

namespace {

struct Parcel {
  Memory bytes;
  Event sent;
  int tag;
  int64_t number;  // counts the parcels with this tag
};

struct Pipe {  // from one rank to another
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Parcel> parcels;
  std::map<int, int64_t> sent, expected;  // the numbers of parcels and of posted receives, by tag
  bool closed = false;

  auto find(int tag, int64_t number) {
    return std::find_if(parcels.begin(), parcels.end(), [=](const Parcel& each) { return each.tag == tag && each.number == number; });
  }
};

class Sent : public Request {
 public:
  void wait(Deadline) override {}  // the pipe holds a copy
  void abort() override {}
};

class Received : public Request {
 public:
  Received(Pipe& pipe, const ExecutionContext& context, void* data, int64_t bytes, int tag)
      : pipe_(pipe), context_(context), data_(data), bytes_(bytes), tag_(tag) {
    std::lock_guard lock(pipe_.mutex);
    number_ = pipe_.expected[tag]++;
  }

  void wait(Deadline deadline) override {
    std::unique_lock lock(pipe_.mutex);
    auto found = pipe_.parcels.end();
    const bool arrived = pipe_.changed.wait_until(lock, deadline, [&] {
      found = pipe_.find(tag_, number_);
      return aborted_ || pipe_.closed || found != pipe_.parcels.end();
    });
    if (aborted_) throw TransportError("aborted");
    if (found == pipe_.parcels.end() && pipe_.closed) throw TransportError("the peer has closed its end");
    if (!arrived) throw TransportError("nothing came");
    Parcel parcel = std::move(*found);
    pipe_.parcels.erase(found);
    lock.unlock();
    parcel.sent.wait(context_);
    parcel.bytes.hand_to(context_);
    if (parcel.bytes.bytes() > bytes_) throw TransportError(text("expected at most ", bytes_, " bytes, got ", parcel.bytes.bytes()));
    copy(context_, data_, parcel.bytes.data(), parcel.bytes.bytes());
  }

  void abort() override {
    std::lock_guard lock(pipe_.mutex);
    aborted_ = true;
    pipe_.changed.notify_all();
  }

 private:
  Pipe& pipe_;
  ExecutionContext context_;
  void* data_;
  int64_t bytes_;
  int tag_;
  int64_t number_;
  bool aborted_ = false;
};

using Pipes = std::vector<std::vector<Pipe>>;  // [from][to]

class InProcess : public Transport {
 public:
  InProcess(std::shared_ptr<Pipes> pipes, int rank) : pipes_(std::move(pipes)), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(pipes_->size()); }

  std::unique_ptr<Request> send(const ExecutionContext& context, int peer, const void* data, int64_t bytes, int tag) override {
    Parcel parcel{Memory(context, bytes), {}, tag, 0};
    copy(context, parcel.bytes.data(), data, bytes);
    parcel.sent = Event::record(context);
    Pipe& pipe = (*pipes_)[rank_][peer];
    std::lock_guard lock(pipe.mutex);
    parcel.number = pipe.sent[tag]++;
    pipe.parcels.push_back(std::move(parcel));
    pipe.changed.notify_all();
    return std::make_unique<Sent>();
  }

  std::unique_ptr<Request> recv(const ExecutionContext& context, int peer, void* data, int64_t bytes, int tag) override {
    return std::make_unique<Received>((*pipes_)[peer][rank_], context, data, bytes, tag);
  }

  void close() noexcept override {
    for (Pipe& pipe : (*pipes_)[rank_]) {
      std::lock_guard lock(pipe.mutex);
      pipe.closed = true;
      pipe.changed.notify_all();
    }
  }

 private:
  std::shared_ptr<Pipes> pipes_;
  int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> in_process_group(int world_size) {
  auto pipes = std::make_shared<Pipes>();
  for (int from = 0; from < world_size; ++from) pipes->emplace_back(world_size);
  std::vector<std::unique_ptr<Transport>> ends;
  for (int rank = 0; rank < world_size; ++rank) ends.push_back(std::make_unique<InProcess>(pipes, rank));
  return ends;
}

}  // namespace dltrain::comm
