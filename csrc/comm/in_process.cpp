#include "comm/in_process.h"

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
  int64_t number;  // of those with its tag
};

struct Pipe {  // from one rank to another
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Parcel> messages;
  std::map<int, int64_t> sent, expected;  // messages and receives posted, by tag
  bool closed = false;

  auto find(int tag, int64_t number) {
    return std::find_if(messages.begin(), messages.end(), [=](const Parcel& each) { return each.tag == tag && each.number == number; });
  }
};

class Sent : public Request {
 public:
  void wait(Deadline) override {}  // the channel holds a copy
  void abort() override {}
};

class Received : public Request {
 public:
  Received(Pipe& channel, const Place& place, void* data, int64_t bytes, int tag)
      : channel_(channel), place_(place), data_(data), bytes_(bytes), tag_(tag) {
    std::lock_guard lock(channel_.mutex);
    number_ = channel_.expected[tag]++;
  }

  void wait(Deadline deadline) override {
    std::unique_lock lock(channel_.mutex);
    auto found = channel_.messages.end();
    const bool came = channel_.changed.wait_until(lock, deadline, [&] {
      found = channel_.find(tag_, number_);
      return aborted_ || channel_.closed || found != channel_.messages.end();
    });
    if (aborted_) throw TransportError("aborted");
    if (found == channel_.messages.end() && channel_.closed) throw TransportError("the peer has closed its end");
    if (!came) throw TransportError("nothing came");
    Parcel message = std::move(*found);
    channel_.messages.erase(found);
    lock.unlock();
    message.sent.wait(place_);
    message.bytes.hand_to(place_);
    if (message.bytes.bytes() > bytes_) throw TransportError(text("expected at most ", bytes_, " bytes, got ", message.bytes.bytes()));
    copy(place_, data_, message.bytes.data(), message.bytes.bytes());
  }

  void abort() override {
    std::lock_guard lock(channel_.mutex);
    aborted_ = true;
    channel_.changed.notify_all();
  }

 private:
  Pipe& channel_;
  Place place_;
  void* data_;
  int64_t bytes_;
  int tag_;
  int64_t number_;
  bool aborted_ = false;
};

using Channels = std::vector<std::vector<Pipe>>;  // [from][to]

class InProcess : public Transport {
 public:
  InProcess(std::shared_ptr<Channels> channels, int rank) : channels_(std::move(channels)), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(channels_->size()); }

  std::unique_ptr<Request> send(const Place& place, int peer, const void* data, int64_t bytes, int tag) override {
    Parcel message{Memory(place, bytes), {}, tag, 0};
    copy(place, message.bytes.data(), data, bytes);
    message.sent = Event::record(place);
    Pipe& channel = (*channels_)[rank_][peer];
    std::lock_guard lock(channel.mutex);
    message.number = channel.sent[tag]++;
    channel.messages.push_back(std::move(message));
    channel.changed.notify_all();
    return std::make_unique<Sent>();
  }

  std::unique_ptr<Request> recv(const Place& place, int peer, void* data, int64_t bytes, int tag) override {
    return std::make_unique<Received>((*channels_)[peer][rank_], place, data, bytes, tag);
  }

  void close() noexcept override {
    for (Pipe& channel : (*channels_)[rank_]) {
      std::lock_guard lock(channel.mutex);
      channel.closed = true;
      channel.changed.notify_all();
    }
  }

 private:
  std::shared_ptr<Channels> channels_;
  int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> in_process_group(int world_size) {
  auto channels = std::make_shared<Channels>();
  for (int from = 0; from < world_size; ++from) channels->emplace_back(world_size);
  std::vector<std::unique_ptr<Transport>> ends;
  for (int rank = 0; rank < world_size; ++rank) ends.push_back(std::make_unique<InProcess>(channels, rank));
  return ends;
}

}  // namespace dltrain::comm
