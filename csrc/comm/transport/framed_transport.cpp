#include "comm/transport/framed_transport.h"

#include <array>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/transport/header.h"
#include "core/cache_line.h"
#include "core/digest.h"

namespace dltrain::comm {

namespace {

constexpr int64_t most = 64 << 10;  // the size of the largest message that is sent inside the frame

using Stamp = uint8_t;  // counts the frames from one rank to another

constexpr size_t ahead = 2;  // the number of receives of frames that are posted before recv needs them

// Ranks whose messages differ in length have different tags. The number of the call is not part of the tag, because connections may keep
// state for each tag. The largest tag is reserved for the carrier.
int tag_of(const Call& call) {
  return static_cast<int>(dltrain::digest({call.numel, call.algorithm, call.codec, call.segments, call.average, call.root, call.layout}) %
                          0x7ffffffe) +
         1;
}

}  // namespace

struct FramedTransport::Frame {
  alignas(cache_line) std::array<char, sizeof(Header) + most + sizeof(Stamp)> bytes;
  std::unique_ptr<Request> request;

  char* message() { return bytes.data() + sizeof(Header); }

  Header header() const {
    Header header;
    std::memcpy(&header, bytes.data(), sizeof header);
    return header;
  }
};

class FramedTransport::Sent : public Request {
 public:
  Sent(Peer& peer, std::unique_ptr<Frame> frame, std::unique_ptr<Request> rest)
      : peer_(peer), frame_(std::move(frame)), rest_(std::move(rest)) {}
  ~Sent() override { give_back(peer_, std::move(frame_)); }

  void wait(Deadline deadline) override {
    if (frame_) frame_->request->wait(deadline);
    if (rest_) rest_->wait(deadline);
  }
  void abort() override {
    if (frame_) frame_->request->abort();
    if (rest_) rest_->abort();
  }

 private:
  Peer& peer_;
  std::unique_ptr<Frame> frame_;
  std::unique_ptr<Request> rest_;
};

class FramedTransport::Received : public Request {
 public:
  Received(Peer& peer, std::unique_ptr<Frame> frame, std::unique_ptr<Request> rest, const Call& call, void* data, int64_t bytes)
      : peer_(peer),
        frame_(std::move(frame)),
        rest_(std::move(rest)),
        call_(call),
        data_(data),
        bytes_(bytes),
        stamp_(static_cast<Stamp>(frame_ ? ++peer.received : peer.received)) {}
  ~Received() override { give_back(peer_, std::move(frame_)); }

  void wait(Deadline deadline) override {
    if (frame_) open(deadline);
    if (rest_) rest_->wait(deadline);
  }
  void abort() override {
    if (frame_) frame_->request->abort();
    if (rest_) rest_->abort();
  }

 private:
  void open(Deadline deadline) {
    poll();
    frame_->request->wait(deadline);
    check_header(frame_->header(), call_, bytes_);
    if (!rest_ && bytes_ > 0) std::memcpy(data_, frame_->message(), static_cast<size_t>(bytes_));
  }

  // Polls for the stamp for a while, because waking a thread takes longer than a small message. The stamp is only a hint: the wait after
  // this decides whether the frame has arrived.
  void poll() {
    constexpr auto polling_time = std::chrono::microseconds(100);
    std::atomic_ref<char> seen(*(frame_->message() + (rest_ ? 0 : bytes_)));
    const auto start = Clock::now();
    while (static_cast<Stamp>(seen.load(std::memory_order_relaxed)) != stamp_ && Clock::now() < start + polling_time)
      std::this_thread::yield();
  }

  Peer& peer_;
  std::unique_ptr<Frame> frame_;
  std::unique_ptr<Request> rest_;
  const Call call_;
  void* const data_;
  const int64_t bytes_;
  const Stamp stamp_;
};

FramedTransport::FramedTransport(std::unique_ptr<Transport> carrier) : carrier_(std::move(carrier)), peers_(carrier_->world_size()) {}

FramedTransport::~FramedTransport() { FramedTransport::close(); }

void FramedTransport::give_back(Peer& peer, std::unique_ptr<Frame> frame) {
  if (!frame) return;
  frame->request.reset();
  peer.unused.push_back(std::move(frame));
}

std::unique_ptr<FramedTransport::Frame> FramedTransport::take_unused(Peer& peer) {
  if (peer.unused.empty()) return std::make_unique<Frame>();
  auto frame = std::move(peer.unused.back());
  peer.unused.pop_back();
  return frame;
}

void FramedTransport::expect(const ExecutionContext& context, int peer) {
  auto frame = take_unused(peers_[peer]);
  frame->request = carrier_->recv(context, peer, frame->bytes.data(), std::ssize(frame->bytes));
  peers_[peer].expected.push_back(std::move(frame));
}

std::unique_ptr<Request> FramedTransport::send(const ExecutionContext& context, int peer, const void* data, int64_t bytes, int) {
  Peer& to = peers_[peer];
  std::unique_ptr<Frame> frame;
  const bool first = std::exchange(to.last_call_sent, call_.number) != call_.number;
  if (first || bytes <= most) {
    frame = take_unused(to);
    const Header header{call_, bytes};
    const int64_t inside = 0 < bytes && bytes <= most ? bytes : 0;
    const auto stamp = static_cast<Stamp>(++to.sent);
    std::memcpy(frame->bytes.data(), &header, sizeof header);
    if (inside > 0) std::memcpy(frame->message(), data, static_cast<size_t>(inside));
    std::memcpy(frame->message() + inside, &stamp, sizeof stamp);
    frame->request = carrier_->send(context, peer, frame->bytes.data(), static_cast<int64_t>(sizeof header + sizeof stamp) + inside);
  }
  auto rest = bytes > most ? carrier_->send(context, peer, data, bytes, tag_of(call_)) : nullptr;
  return std::make_unique<Sent>(to, std::move(frame), std::move(rest));
}

std::unique_ptr<Request> FramedTransport::recv(const ExecutionContext& context, int peer, void* data, int64_t bytes, int) {
  Peer& from = peers_[peer];
  std::unique_ptr<Frame> frame;
  const bool first = std::exchange(from.last_call_received, call_.number) != call_.number;
  if (first || bytes <= most) {
    try {
      while (from.expected.size() <= ahead) expect(context, peer);
    } catch (const TransportError&) {
      if (from.expected.empty()) throw;  // otherwise the peer may have left after its last message, which has arrived
    }
    frame = std::move(from.expected.front());
    from.expected.pop_front();
  }
  auto rest = bytes > most ? carrier_->recv(context, peer, data, bytes, tag_of(call_)) : nullptr;
  return std::make_unique<Received>(from, std::move(frame), std::move(rest), call_, data, bytes);
}

void FramedTransport::close() noexcept {
  if (std::exchange(closed_, true)) return;
  constexpr auto closing_time = std::chrono::milliseconds(100);
  const Deadline deadline = Clock::now() + closing_time;
  std::vector<std::unique_ptr<Request>> closing;
  std::vector<std::unique_ptr<Request>> unexpected;  // to peers that may never post a receive
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    auto& requests = peers_[peer].sent > 0 ? closing : unexpected;
    try {
      requests.push_back(send({}, peer, "", Header::closed));
    } catch (const std::exception&) {
      continue;  // a peer that cannot be reached detects this by itself
    }
  }
  for (auto& request : closing) {
    try {
      request->wait(deadline);
    } catch (const std::exception&) {
      request->abort();
    }
  }
  for (auto& request : unexpected) request->abort();
  for (Peer& peer : peers_) {
    for (auto& frame : peer.expected) frame->request->abort();
    peer.expected.clear();
  }
  closing.clear();
  unexpected.clear();
  carrier_->close();
}

std::string FramedTransport::last_words(int peer) {
  for (auto& frame : peers_[peer].expected) {
    try {
      frame->request->wait(Clock::now());
    } catch (const TransportError&) {
      break;
    }
    const Header header = frame->header();
    if (header.bytes == Header::closed || header.call != call_) return difference(header, call_);
  }
  return {};
}

}  // namespace dltrain::comm
