#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "bindings/comm/gloo/waits.h"
#include "comm/transport/event_queue.h"
#include "comm/transport/mailbox.h"
#include "comm/transport/message_pool.h"

namespace dltrain::bindings {

// Over a ProcessGroupGloo that serves nobody else, and that nobody else holds: connections are closed with it.
//
// Every message begins with a frame, for which the receiver always has receives posted. A frame contains the message where that fits; else
// the frame says how long the pieces are that follow under a tag of their own, since Gloo ends the process when a message is longer than
// its receive.
//
//   | Header | up to 576 KiB |        or        | Header | message's header |   and then each piece
//
// A thread for each peer waits for the peer's frames. Nobody waits for sends, which Gloo completes when the peer posts its receive, so for
// a stopped peer never: frames acknowledge what has been received, and what they acknowledge is released.
class GlooMailbox final : public comm::Mailbox {
 public:
  explicit GlooMailbox(c10::intrusive_ptr<c10d::Backend> backend, int64_t limit = default_limit);
  ~GlooMailbox() override;

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  SendResult send(int peer, Bytes header, std::span<const Bytes> pieces, std::shared_ptr<const void> keep) override;
  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return pool_.take(bytes); }
  std::optional<Event> receive(Deadline deadline) override { return queue_.pop(deadline); }
  void close(std::chrono::milliseconds grace) override;
  bool is_closed() const override { return queue_.is_closed(); }

 private:
  enum class FrameKind : int32_t { message, acknowledgment, end };
  struct Header;
  struct Frame;
  struct Posted;
  struct Session;
  using Lock = std::unique_lock<std::mutex>;

  void write_header(Frame& frame, FrameKind kind, int64_t bytes, Bytes first, std::span<const Bytes> here);
  void post(const Lock& lock, Session& session, Frame frame);
  void post_receive(Session& session, Posted& posted, std::byte* data, int64_t bytes, int tag);
  bool wait(Session& session, const Posted& posted);

  void listen(Session& session);
  bool take(Session& session, Posted& frame);
  static void check_header(Session& session, const Header& header);
  bool receive_message(Session& session, const Header& header, Posted& frame);
  static void acknowledged(Session& session, int64_t frames);
  void acknowledge(Session& session, const Header& header);
  bool asks(const Session& session, const Header& header) const;
  void end(Session& session, const std::string& reason, bool is_connected);
  void send_end(Session& session);
  void stop();

  const int rank_, world_size_;
  const int64_t limit_;
  comm::MessagePool pool_;
  comm::EventQueue queue_;
  c10::intrusive_ptr<c10d::Backend> backend_;  // until the threads have ended
  GlooWaits waits_;
  std::vector<std::unique_ptr<Session>> sessions_;  // by peer; null for this rank
  std::mutex closing_;                              // held while the sessions are being ended
};

}  // namespace dltrain::bindings
