#include "comm/in_process.h"

#include <condition_variable>
#include <deque>
#include <mutex>

#include "core/check.h"
#include "core/event.h"
#include "core/memory.h"

namespace dltrain::comm {

namespace {

struct Message {
  Memory bytes;
  Event sent;
};

struct Channel {  // from one rank to another
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Message> messages;
};

class Sent : public Request {
 public:
  void wait(Deadline) override {}  // the channel holds a copy
  void abort() override {}
};

class Received : public Request {
 public:
  Received(Channel& channel, const Place& place, void* data, int64_t bytes)
      : channel_(channel), place_(place), data_(data), bytes_(bytes) {}

  void wait(Deadline deadline) override {
    std::unique_lock lock(channel_.mutex);
    const bool came = channel_.changed.wait_until(lock, deadline, [this] { return aborted_ || !channel_.messages.empty(); });
    if (aborted_) throw TransportError("aborted");
    if (!came) throw TransportError("nothing came");
    Message message = std::move(channel_.messages.front());
    channel_.messages.pop_front();
    lock.unlock();
    message.sent.wait(place_);
    message.bytes.hand_to(place_);
    if (message.bytes.bytes() != bytes_) throw TransportError(text("expected ", bytes_, " bytes, got ", message.bytes.bytes()));
    copy(place_, data_, message.bytes.data(), bytes_);
  }

  void abort() override {
    std::lock_guard lock(channel_.mutex);
    aborted_ = true;
    channel_.changed.notify_all();
  }

 private:
  Channel& channel_;
  Place place_;
  void* data_;
  int64_t bytes_;
  bool aborted_ = false;
};

using Channels = std::vector<std::vector<Channel>>;  // [from][to]

class InProcess : public Transport {
 public:
  InProcess(std::shared_ptr<Channels> channels, int rank) : channels_(std::move(channels)), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(channels_->size()); }

  std::unique_ptr<Request> send(const Place& place, int peer, const void* data, int64_t bytes) override {
    Message message{Memory(place, bytes), {}};
    copy(place, message.bytes.data(), data, bytes);
    message.sent = Event::record(place);
    Channel& channel = (*channels_)[rank_][peer];
    std::lock_guard lock(channel.mutex);
    channel.messages.push_back(std::move(message));
    channel.changed.notify_all();
    return std::make_unique<Sent>();
  }

  std::unique_ptr<Request> recv(const Place& place, int peer, void* data, int64_t bytes) override {
    return std::make_unique<Received>((*channels_)[peer][rank_], place, data, bytes);
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
