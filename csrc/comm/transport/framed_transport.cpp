#include "comm/transport/framed_transport.h"

#include <array>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "core/cache_line.h"
#include "core/check.h"
#include "core/digest.h"

namespace dltrain::comm {

namespace {

constexpr int64_t most = 64 << 10;  // bytes of a message that travels inside
constexpr int64_t failed = -1;

struct Header {
  Call call;
  int64_t bytes;  // of the message; `failed` where none will come any more
};

static_assert(sizeof(Header) == cache_line);  // then a message that travels inside begins a line, too

using Stamp = uint8_t;  // counts the envelopes from one rank to another

constexpr size_t ahead = 2;  // envelopes posted for messages that nobody has asked for yet

// Ranks whose messages differ in length have different ones. Not made of the call's number: connections may keep something for each tag.
// The largest tag is left to the carrier.
int tag_of(const Call& call) {
  return static_cast<int>(dltrain::digest({call.numel, call.algorithm, call.codec, call.segments, call.average, call.root, call.layout}) %
                          0x7ffffffe) +
         1;
}

// What to say of a header that is not the expected one.
std::string difference(const Header& header, const Call& call) {
  if (header.bytes == failed && header.call.number == 0) return "it has closed its end";
  const std::string theirs = text(header.bytes == failed ? "it has closed its end; its latest is " : "it is in ", describe(header.call));
  return header.call == call ? theirs : text(theirs, "; this rank is in ", describe(call));
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
      : peer_(peer), envelope_(std::move(frame)), rest_(std::move(rest)) {}
  ~Sent() override { give_back(peer_, std::move(envelope_)); }

  void wait(Deadline deadline) override {
    if (envelope_) envelope_->request->wait(deadline);
    if (rest_) rest_->wait(deadline);
  }
  void abort() override {
    if (envelope_) envelope_->request->abort();
    if (rest_) rest_->abort();
  }

 private:
  Peer& peer_;
  std::unique_ptr<Frame> envelope_;
  std::unique_ptr<Request> rest_;
};

class FramedTransport::Received : public Request {
 public:
  Received(Peer& peer, std::unique_ptr<Frame> frame, std::unique_ptr<Request> rest, const Call& call, void* data, int64_t bytes)
      : peer_(peer),
        envelope_(std::move(frame)),
        rest_(std::move(rest)),
        call_(call),
        data_(data),
        bytes_(bytes),
        stamp_(static_cast<Stamp>(envelope_ ? ++peer.received : peer.received)) {}
  ~Received() override { give_back(peer_, std::move(envelope_)); }

  void wait(Deadline deadline) override {
    if (envelope_) open(deadline);
    if (rest_) rest_->wait(deadline);
  }
  void abort() override {
    if (envelope_) envelope_->request->abort();
    if (rest_) rest_->abort();
  }

 private:
  void open(Deadline deadline) {
    poll();
    envelope_->request->wait(deadline);
    const Header header = envelope_->header();
    const bool agrees = header.call == call_;
    if (header.bytes == failed && (agrees || header.call.number != call_.number)) throw PeerClosed(difference(header, call_));
    if (!agrees) throw Disagreement(difference(header, call_));
    if (header.bytes != bytes_) throw Disagreement(text("it sends ", header.bytes, " bytes, this rank expects ", bytes_));
    if (!rest_ && bytes_ > 0) std::memcpy(data_, envelope_->message(), static_cast<size_t>(bytes_));
  }

  // Looks for the stamp for a while, since to be woken takes longer than a small message does. What it sees is a hint: the wait that
  // follows is what counts.
  void poll() {
    constexpr auto answer_timeout = std::chrono::microseconds(100);
    std::atomic_ref<char> seen(*(envelope_->message() + (rest_ ? 0 : bytes_)));
    const auto start = Clock::now();
    while (static_cast<Stamp>(seen.load(std::memory_order_relaxed)) != stamp_ && Clock::now() < start + answer_timeout)
      std::this_thread::yield();
  }

  Peer& peer_;
  std::unique_ptr<Frame> envelope_;
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
  peer.empty.push_back(std::move(frame));
}

std::unique_ptr<FramedTransport::Frame> FramedTransport::empty_one(Peer& peer) {
  if (peer.empty.empty()) return std::make_unique<Frame>();
  auto frame = std::move(peer.empty.back());
  peer.empty.pop_back();
  return frame;
}

void FramedTransport::expect(const ExecutionContext& context, int peer) {
  auto frame = empty_one(peers_[peer]);
  frame->request = carrier_->recv(context, peer, frame->bytes.data(), std::ssize(frame->bytes));
  peers_[peer].expected.push_back(std::move(frame));
}

std::unique_ptr<Request> FramedTransport::send(const ExecutionContext& context, int peer, const void* data, int64_t bytes, int) {
  Peer& to = peers_[peer];
  std::unique_ptr<Frame> frame;
  const bool first = std::exchange(to.told, call_.number) != call_.number;
  if (first || bytes <= most) {
    frame = empty_one(to);
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
  const bool first = std::exchange(from.heard, call_.number) != call_.number;
  if (first || bytes <= most) {
    try {
      while (from.expected.size() <= ahead) expect(context, peer);
    } catch (const TransportError&) {
      if (from.expected.empty()) throw;  // else the peer may have left after its last message, which is here
    }
    frame = std::move(from.expected.front());
    from.expected.pop_front();
  }
  auto rest = bytes > most ? carrier_->recv(context, peer, data, bytes, tag_of(call_)) : nullptr;
  return std::make_unique<Received>(from, std::move(frame), std::move(rest), call_, data, bytes);
}

void FramedTransport::close() noexcept {
  if (std::exchange(closed_, true)) return;
  constexpr auto answer_timeout = std::chrono::milliseconds(100);
  const Deadline deadline = Clock::now() + answer_timeout;
  std::vector<std::unique_ptr<Request>> farewells;
  std::vector<std::unique_ptr<Request>> unheard;  // by peers that may never listen
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    auto& where = peers_[peer].sent > 0 ? farewells : unheard;
    try {
      where.push_back(send({}, peer, "", failed));
    } catch (const std::exception&) {
      continue;  // a peer that cannot be told finds out by itself
    }
  }
  for (auto& farewell : farewells) {
    try {
      farewell->wait(deadline);
    } catch (const std::exception&) {
      farewell->abort();
    }
  }
  for (auto& farewell : unheard) farewell->abort();
  for (Peer& peer : peers_) {
    for (auto& frame : peer.expected) frame->request->abort();
    peer.expected.clear();
  }
  farewells.clear();
  unheard.clear();
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
    if (header.bytes == failed || header.call != call_) return difference(header, call_);
  }
  return {};
}

}  // namespace dltrain::comm
