#include "comm/in_process.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>

#include "core/check.h"

namespace dltrain::comm {

namespace {

struct Channel {  // from one rank to another
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::vector<char>> messages;
};

class Sent : public Request {
 public:
  void wait(Deadline) override {}  // the channel holds a copy
  void abort() override {}
};

class Received : public Request {
 public:
  Received(Channel& channel, void* data, int64_t bytes) : channel_(channel), data_(data), bytes_(bytes) {}

  void wait(Deadline deadline) override {
    std::unique_lock lock(channel_.mutex);
    const bool came = channel_.changed.wait_until(lock, deadline, [this] { return aborted_ || !channel_.messages.empty(); });
    if (aborted_) throw TransportError("aborted");
    if (!came) throw TransportError("nothing came");
    const std::vector<char> message = std::move(channel_.messages.front());
    channel_.messages.pop_front();
    if (static_cast<int64_t>(message.size()) != bytes_) {
      throw TransportError(text("expected ", bytes_, " bytes, got ", message.size()));
    }
    std::memcpy(data_, message.data(), message.size());
  }

  void abort() override {
    std::lock_guard lock(channel_.mutex);
    aborted_ = true;
    channel_.changed.notify_all();
  }

 private:
  Channel& channel_;
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

  std::unique_ptr<Request> send(int peer, const void* data, int64_t bytes) override {
    Channel& channel = (*channels_)[rank_][peer];
    std::lock_guard lock(channel.mutex);
    const char* begin = static_cast<const char*>(data);
    channel.messages.emplace_back(begin, begin + bytes);
    channel.changed.notify_all();
    return std::make_unique<Sent>();
  }

  std::unique_ptr<Request> recv(int peer, void* data, int64_t bytes) override {
    return std::make_unique<Received>((*channels_)[peer][rank_], data, bytes);
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
