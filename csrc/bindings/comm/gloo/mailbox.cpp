#include "bindings/comm/gloo/mailbox.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "bindings/comm/gloo/unobserved.h"
#include "comm/transport/gather.h"
#include "comm/transport/transport.h"
#include "core/cache_line.h"
#include "core/check.h"

namespace dltrain::bindings {

namespace {

constexpr int frame_tag = 0, piece_tag = 1;
// Gloo's thread spins while a message waits for its receive, so messages of this size should not need one of their own.
constexpr int64_t frame_bytes = (512 + 64) << 10;
// Of receives of frames. A peer waits for a word from this rank before it sends more, and that word waits behind all that this rank sends.
constexpr int most_posted = 16, least_posted = 4, all_posted = 64;
constexpr int64_t copied_bytes = 256 << 10;        // a message of so many in a frame is copied; a larger one keeps the frame's memory
constexpr int64_t unacknowledged_bytes = 4 << 20;  // of messages in frames, which their sender has copied
constexpr uint64_t frame_mark = 0x31786f626c69616dULL;
constexpr int most_pieces = 16;

// The peer does not keep to the protocol. Its connection is as it was.
class InvalidFrame : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

std::vector<at::Tensor> tensors_at(const void* data, int64_t bytes) { return {at::from_blob(const_cast<void*>(data), {bytes}, at::kByte)}; }

}  // namespace

struct GlooMailbox::Header {
  uint64_t mark = frame_mark;
  int64_t number = 0;        // of the frame, in its session and direction
  int64_t acknowledged = 0;  // frames that its sender has received
  FrameKind kind = FrameKind::message;
  int16_t pieces = 0;  // that follow
  int16_t asks = 0;    // for an acknowledgment
  int64_t bytes = 0;   // of the message
  int64_t here = 0;    // bytes of the message that the frame contains
  std::array<int64_t, most_pieces> lengths{};
};

namespace {

constexpr int64_t header_bytes = 192;  // whole cache lines, since the message of a frame begins behind it
constexpr int64_t room_in_frame = frame_bytes - header_bytes;

}  // namespace

// On its way. Gloo cannot take back a send, so this stays until the peer has it or the connection is closed.
struct GlooMailbox::Frame {
  int64_t number = 0, cost = 0, bytes = 0;
  std::shared_ptr<std::byte> memory;  // a Header, and what the frame contains of the message
  std::vector<Bytes> pieces;
  std::shared_ptr<const void> keep;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;  // destroyed before the memory that they use
};

struct GlooMailbox::Posted {
  void release() {
    works.clear();  // before the memory that they use
    memory.reset();
  }
  std::shared_ptr<std::byte> memory;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
};

struct GlooMailbox::Session {
  Session(int peer, int posted) : peer(peer), frames(static_cast<size_t>(posted)) {}

  const int peer;
  std::thread thread;
  // Of that thread. Gloo's thread would spin over a message whose receive has been dropped, so they stay until the connection is closed.
  std::vector<Posted> frames;
  Posted message;
  bool has_closed = false;  // the peer has

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<Frame> sent;               // and not acknowledged
  int64_t number = 0;                   // of the next frame
  int64_t held = 0;                     // the cost of what was sent
  int64_t received = 0;                 // frames; written by the session's thread alone
  int64_t unasked = 0;                  // the cost of what was sent since a frame asked for an acknowledgment
  int64_t end_frame = -1;               // the number of this rank's
  bool open = true;                     // for messages to the peer
  bool ended = false, stopped = false;  // of the thread: nothing more comes; it is told to end
  c10::intrusive_ptr<c10d::Work> waiting;
};

GlooMailbox::GlooMailbox(c10::intrusive_ptr<c10d::Backend> backend, int64_t limit)
    : rank_(backend->getRank()),
      world_size_(backend->getSize()),
      limit_(limit),
      pool_(4 * limit),
      queue_(world_size_, limit),
      backend_(std::move(backend)),
      waits_(backend_, GlooWaits::Others::leave) {
  static_assert(sizeof(Header) <= header_bytes && header_bytes % cache_line == 0 && std::is_trivially_copyable_v<Header>);
  const int posted = std::clamp(all_posted / world_size_, least_posted, most_posted);
  for (int peer = 0; peer < world_size_; ++peer) sessions_.push_back(peer == rank_ ? nullptr : std::make_unique<Session>(peer, posted));
  try {
    for (const auto& session : sessions_) {
      if (session) session->thread = std::thread([this, &session = *session] { listen(session); });
    }
  } catch (...) {
    queue_.close();
    stop();
    throw;
  }
}

GlooMailbox::~GlooMailbox() {
  const std::lock_guard once(closing_);
  queue_.close();
  if (backend_) stop();
}

comm::Mailbox::SendResult GlooMailbox::send(int peer, Bytes header, std::span<const Bytes> pieces, std::shared_ptr<const void> keep) {
  dltrain::check(peer >= 0 && peer < world_size_, "peer: expected a rank below ", world_size_, ", got ", peer);
  const int64_t bytes = comm::count_bytes(header, pieces);
  const auto gathered = [&] {
    auto memory = pool_.take(bytes);
    comm::gather(memory.get(), header, pieces);
    return memory;
  };
  if (peer == rank_) {
    if (const auto result = queue_.would_take(peer); result != SendResult::taken) return result;
    return queue_.offer({Event::Kind::message, peer, gathered(), bytes, {}});
  }
  Session& session = *sessions_[peer];
  const auto would_take = [&](const Lock&) {
    if (!session.open) return SendResult::closed;
    return session.held < limit_ ? SendResult::taken : SendResult::full;
  };
  if (const auto result = would_take(Lock(session.mutex)); result != SendResult::taken) return result;  // before anything is copied

  Frame frame;
  frame.cost = comm::EventQueue::cost(bytes);
  std::span<const Bytes> here = pieces;
  if (bytes > room_in_frame) {
    here = {};
    std::copy_if(pieces.begin(), pieces.end(), std::back_inserter(frame.pieces), [](const Bytes& piece) { return piece.count > 0; });
    frame.keep = std::move(keep);
    if (!frame.keep || header.count > room_in_frame || std::ssize(frame.pieces) > most_pieces) {
      const auto memory = gathered();
      header = {};
      frame.pieces = {{memory.get(), bytes}};
      frame.keep = memory;
    }
  }
  write_header(frame, FrameKind::message, bytes, header, here);
  const Lock lock(session.mutex);
  if (const auto result = would_take(lock); result != SendResult::taken) return result;
  try {
    post(lock, session, std::move(frame));
  } catch (const std::exception&) {
    session.open = false;  // its thread sees why, and says so
    return SendResult::closed;
  }
  return SendResult::taken;
}

void GlooMailbox::write_header(Frame& frame, FrameKind kind, int64_t bytes, Bytes first, std::span<const Bytes> here) {
  Header header;
  header.kind = kind;
  header.bytes = bytes;
  header.here = comm::count_bytes(first, here);
  header.pieces = static_cast<int16_t>(frame.pieces.size());
  for (size_t i = 0; i < frame.pieces.size(); ++i) header.lengths[i] = frame.pieces[i].count;
  frame.bytes = header_bytes + header.here;
  frame.memory = pool_.take(frame.bytes);
  std::memcpy(frame.memory.get(), &header, sizeof header);
  comm::gather(frame.memory.get() + header_bytes, first, here);
}

// Under the session's mutex, so that all of the frame's messages are posted in the order in which the peer receives them.
void GlooMailbox::post(const Lock&, Session& session, Frame frame) {
  frame.number = session.number++;
  Header header;
  std::memcpy(&header, frame.memory.get(), sizeof header);
  header.number = frame.number;
  header.acknowledged = session.received;
  session.unasked += frame.cost;
  header.asks = asks(session, header) ? 1 : 0;
  if (header.asks != 0) session.unasked = 0;
  std::memcpy(frame.memory.get(), &header, sizeof header);
  session.held += frame.cost;
  session.sent.push_back(std::move(frame));
  Frame& posted = session.sent.back();
  const Unobserved unobserved;
  const auto send = [&](const void* data, int64_t bytes, int tag) {
    auto tensors = tensors_at(data, bytes);
    posted.works.push_back(backend_->send(tensors, session.peer, tag));
  };
  send(posted.memory.get(), posted.bytes, frame_tag);
  for (const Bytes& piece : posted.pieces) send(piece.data, piece.count, piece_tag);
}

// At once where the frame holds memory of the caller, or is the last; and else so often that the session does not stay full.
bool GlooMailbox::asks(const Session& session, const Header& header) const {
  if (header.kind != FrameKind::message) return header.kind == FrameKind::end;
  return header.pieces > 0 || session.unasked >= std::min(unacknowledged_bytes, limit_ / 2);
}

void GlooMailbox::post_receive(Session& session, Posted& posted, std::byte* data, int64_t bytes, int tag) {
  auto tensors = tensors_at(data, bytes);
  const Unobserved unobserved;
  posted.works.push_back(backend_->recv(tensors, session.peer, tag));
}

// False where it has been told to stop. Throws what Gloo throws, and TransportError, when the connection is lost.
bool GlooMailbox::wait(Session& session, const Posted& posted) {
  constexpr auto for_ever = std::chrono::hours(24 * 365);  // the end of a timeout would close all connections
  for (const auto& work : posted.works) {
    {
      const Lock lock(session.mutex);
      if (session.stopped) return false;
      session.waiting = work;
    }
    const bool came = waits_.wait(session.peer, *work, for_ever);
    const Lock lock(session.mutex);
    session.waiting.reset();
    if (!came) return false;
  }
  return true;
}

// In the session's thread, like all that follows until its end.
void GlooMailbox::listen(Session& session) {
  const auto expect = [&](Posted& frame) {
    frame.works.clear();
    if (!frame.memory) frame.memory = pool_.take(frame_bytes);
    post_receive(session, frame, frame.memory.get(), frame_bytes, frame_tag);
  };
  try {
    for (Posted& frame : session.frames) expect(frame);
    for (;;) {
      Posted& frame = session.frames[session.received % session.frames.size()];
      if (!wait(session, frame) || !take(session, frame)) break;
      expect(frame);
    }
    end(session, {}, true);
  } catch (const InvalidFrame& error) {
    end(session, error.what(), true);
  } catch (const std::bad_alloc&) {
    end(session, "there is no memory for its message", true);
  } catch (const std::exception& error) {
    const std::string said = error.what();
    end(session, said.substr(0, said.find('\n')), false);
  }
}

bool GlooMailbox::take(Session& session, Posted& frame) {
  Header header;
  std::memcpy(&header, frame.memory.get(), sizeof header);
  check_header(session, header);
  acknowledged(session, header.acknowledged);
  if (header.kind == FrameKind::message && !receive_message(session, header, frame)) return false;
  if (header.kind == FrameKind::end) {
    {
      const Lock lock(session.mutex);
      session.open = false;  // before anyone can learn of it
    }
    queue_.push({Event::Kind::closed, session.peer, {}, 0, {}});
    session.has_closed = true;
  }
  acknowledge(session, header);
  return true;
}

void GlooMailbox::check_header(Session& session, const Header& header) {
  int64_t bytes = header.here;
  bool is_valid = header.mark == frame_mark && header.number == session.received && header.here >= 0 && header.here <= room_in_frame &&
                  header.pieces >= 0 && header.pieces <= most_pieces;
  for (int i = 0; is_valid && i < header.pieces; ++i) {
    is_valid = header.lengths[i] > 0 && header.lengths[i] <= header.bytes;
    bytes += header.lengths[i];
  }
  const Lock lock(session.mutex);
  if (!is_valid || bytes != header.bytes || header.acknowledged > session.number) {
    throw InvalidFrame("it sent something other than a frame of this version");
  }
}

bool GlooMailbox::receive_message(Session& session, const Header& header, Posted& frame) {
  queue_.wait_for_room(session.peer);
  std::byte* const here = frame.memory.get() + header_bytes;
  if (header.pieces == 0 && header.bytes > copied_bytes) {
    queue_.push({Event::Kind::message, session.peer, {std::move(frame.memory), here}, header.bytes, {}});
    return true;
  }
  Posted& message = session.message;
  message.memory = pool_.take(header.bytes);
  std::memcpy(message.memory.get(), here, static_cast<size_t>(header.here));
  std::byte* to = message.memory.get() + header.here;
  for (int i = 0; i < header.pieces; to += header.lengths[i++]) post_receive(session, message, to, header.lengths[i], piece_tag);
  if (!wait(session, message)) return false;
  message.works.clear();
  queue_.push({Event::Kind::message, session.peer, std::move(message.memory), header.bytes, {}});
  return true;
}

void GlooMailbox::acknowledged(Session& session, int64_t frames) {
  std::deque<Frame> arrived;  // released outside of the mutex
  const Lock lock(session.mutex);
  while (!session.sent.empty() && session.sent.front().number < frames) {
    session.held -= session.sent.front().cost;
    arrived.push_back(std::move(session.sent.front()));
    session.sent.pop_front();
  }
  session.changed.notify_all();
}

// Every frame acknowledges; one that does nothing else is sent where the peer asks.
void GlooMailbox::acknowledge(Session& session, const Header& header) {
  const Lock lock(session.mutex);
  ++session.received;
  if (header.asks == 0) return;
  Frame frame;
  write_header(frame, FrameKind::acknowledgment, 0, {}, {});
  post(lock, session, std::move(frame));
}

void GlooMailbox::end(Session& session, const std::string& reason, bool is_connected) {
  std::deque<Frame> lost;  // released outside of the mutex
  bool is_news = false;
  {
    const Lock lock(session.mutex);
    session.open = false;
    session.ended = true;
    session.waiting.reset();
    is_news = !session.has_closed && !session.stopped;
    if (!is_connected) lost.swap(session.sent);
    session.changed.notify_all();
  }
  if (!is_connected) {
    for (Posted& frame : session.frames) frame.release();
    session.message.release();
  }
  if (is_news) queue_.push({Event::Kind::broken, session.peer, {}, 0, reason});
}

void GlooMailbox::close(std::chrono::milliseconds grace) {
  const std::lock_guard once(closing_);
  queue_.close();
  if (!backend_) return;
  const Deadline deadline = Clock::now() + grace;
  for (const auto& session : sessions_) {
    if (session) send_end(*session);
  }
  for (const auto& session : sessions_) {
    if (!session) continue;
    Lock lock(session->mutex);
    session->changed.wait_until(lock, deadline, [&] {
      return session->ended || session->end_frame < 0 || session->sent.empty() || session->sent.front().number > session->end_frame;
    });
  }
  stop();
}

// Behind all messages. Where the peer has closed before, it has no use for one.
void GlooMailbox::send_end(Session& session) {
  const Lock lock(session.mutex);
  if (!std::exchange(session.open, false)) return;
  Frame frame;
  write_header(frame, FrameKind::end, 0, {}, {});
  try {
    const int64_t number = session.number;
    post(lock, session, std::move(frame));
    session.end_frame = number;
  } catch (const std::exception&) {
    return;  // the connection is lost
  }
}

// Gloo lets go of the memory of a message, also of one that is half way, when the work is destroyed; and it closes the connections when all
// work and the backend are.
void GlooMailbox::stop() {
  for (const auto& session : sessions_) {
    if (!session) continue;
    const Lock lock(session->mutex);
    session->open = false;
    session->stopped = true;
    if (session->waiting) session->waiting->abort();
  }
  for (const auto& session : sessions_) {
    if (session && session->thread.joinable()) session->thread.join();
  }
  for (const auto& session : sessions_) {
    if (!session) continue;
    std::deque<Frame> dropped;  // released outside of the mutex
    for (Posted& frame : session->frames) frame.release();
    session->message.release();
    const Lock lock(session->mutex);
    dropped.swap(session->sent);
  }
  waits_.close();
  backend_.reset();
}

}  // namespace dltrain::bindings
