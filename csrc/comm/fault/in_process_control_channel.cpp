#include "comm/fault/in_process_control_channel.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

namespace dltrain::comm {

namespace {

struct End {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<ControlChannel::Received> messages;
  bool closed = false;
};

using Ends = std::vector<End>;

class InProcessControlChannel : public ControlChannel {
 public:
  InProcessControlChannel(std::shared_ptr<Ends> ends, int rank) : ends_(std::move(ends)), rank_(rank) {}
  ~InProcessControlChannel() override { InProcessControlChannel::close(); }

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(ends_->size()); }

  bool send(int peer, const ControlMessage& message) noexcept override {
    End& end = (*ends_)[peer];
    std::lock_guard lock(end.mutex);
    if (end.closed) return false;
    end.messages.push_back({rank_, message});
    end.changed.notify_all();
    return true;
  }

  std::optional<Received> receive() override {
    End& end = (*ends_)[rank_];
    std::unique_lock lock(end.mutex);
    end.changed.wait(lock, [&] { return end.closed || !end.messages.empty(); });
    if (end.closed) return {};
    const Received received = end.messages.front();
    end.messages.pop_front();
    return received;
  }

  void close() noexcept override {
    End& end = (*ends_)[rank_];
    std::lock_guard lock(end.mutex);
    end.closed = true;
    end.changed.notify_all();
  }

 private:
  const std::shared_ptr<Ends> ends_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<ControlChannel>> in_process_control_channels(int world_size) {
  const auto all = std::make_shared<Ends>(world_size);
  std::vector<std::unique_ptr<ControlChannel>> ends;
  for (int rank = 0; rank < world_size; ++rank) ends.push_back(std::make_unique<InProcessControlChannel>(all, rank));
  return ends;
}

}  // namespace dltrain::comm
