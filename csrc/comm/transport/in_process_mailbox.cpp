#include "comm/transport/in_process_mailbox.h"

#include <deque>
#include <mutex>
#include <utility>

#include "comm/transport/event_queue.h"
#include "comm/transport/gather.h"
#include "comm/transport/message_pool.h"
#include "core/check.h"

namespace dltrain::comm {

namespace {

struct PostOffice {
  PostOffice(int world_size, int64_t limit) : pool(4 * limit) {
    for (int rank = 0; rank < world_size; ++rank) queues.emplace_back(world_size, limit);
  }
  MessagePool pool;
  std::deque<EventQueue> queues;  // by receiver
};

class InProcessMailbox final : public Mailbox {
 public:
  InProcessMailbox(std::shared_ptr<PostOffice> office, int rank) : office_(std::move(office)), rank_(rank) {}
  ~InProcessMailbox() override { end(Event::Kind::broken, "it has dropped its mailbox"); }

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(office_->queues.size()); }

  SendResult send(int peer, Bytes header, std::span<const Bytes> pieces, std::shared_ptr<const void>) override {
    check(peer >= 0 && peer < world_size(), "peer: expected a rank below ", world_size(), ", got ", peer);
    EventQueue& queue = office_->queues[peer];
    const std::lock_guard lock(mutex_);  // nothing is sent behind the end of the session
    if (is_closed()) return SendResult::closed;
    if (const auto result = queue.would_take(rank_); result != SendResult::taken) return result;
    const int64_t bytes = count_bytes(header, pieces);
    auto data = office_->pool.take(bytes);
    gather(data.get(), header, pieces);
    return queue.offer({Event::Kind::message, rank_, std::move(data), bytes, {}});
  }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return office_->pool.take(bytes); }

  std::optional<Event> receive(Deadline deadline) override { return own().pop(deadline); }

  void close(std::chrono::milliseconds) override { end(Event::Kind::closed, {}); }
  bool is_closed() const override { return own().is_closed(); }

 private:
  EventQueue& own() const { return office_->queues[rank_]; }

  void end(Event::Kind kind, const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (is_closed()) return;
    own().close();
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank_) office_->queues[peer].push({kind, rank_, {}, 0, reason});
    }
  }

  const std::shared_ptr<PostOffice> office_;
  const int rank_;
  std::mutex mutex_;  // held while a message or the end of the sessions goes into other queues
};

}  // namespace

std::vector<std::unique_ptr<Mailbox>> in_process_mailboxes(int world_size, int64_t limit) {
  const auto office = std::make_shared<PostOffice>(world_size, limit);
  std::vector<std::unique_ptr<Mailbox>> mailboxes;
  for (int rank = 0; rank < world_size; ++rank) mailboxes.push_back(std::make_unique<InProcessMailbox>(office, rank));
  return mailboxes;
}

}  // namespace dltrain::comm
