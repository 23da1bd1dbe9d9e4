#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace dltrain::comm {

// Sends messages in frames that say to which call they belong, so that ranks detect a disagreement. All frames have one maximum size, and
// receives for some are always posted, so no unexpected frame is too long, and the receive of a small message is already posted. A message
// that does not fit is sent separately, under a tag that is made of the call, so that only ranks that agree use the same tag. After the
// first frame of a call to a peer, such messages need no further frame.
//
//   | Header | message of up to 64 KiB | stamp |        or        | Header | stamp |   and then the message
//
// Only for CPU memory.
class FramedTransport : public Transport, public Framing {
 public:
  explicit FramedTransport(std::unique_ptr<Transport> carrier);
  ~FramedTransport() override;

  int rank() const override { return carrier_->rank(); }
  int world_size() const override { return carrier_->world_size(); }
  std::unique_ptr<Request> send(const ExecutionContext& context, int peer, const void* data, int64_t bytes, int tag = 0) override;
  std::unique_ptr<Request> recv(const ExecutionContext& context, int peer, void* data, int64_t bytes, int tag = 0) override;
  void close() noexcept override;
  Framing* framing() override { return this; }

  void begin(const Call& call) override { call_ = call; }
  std::string last_words(int peer) override;

 private:
  struct Frame;
  class Sent;
  class Received;
  struct Peer {
    int64_t sent = 0, received = 0;                        // frames
    int64_t last_call_sent = -1, last_call_received = -1;  // the latest call of which a frame was sent or received
    std::deque<std::unique_ptr<Frame>> expected;           // posted receives of frames that recv has not used yet
    std::vector<std::unique_ptr<Frame>> unused;
  };

  static std::unique_ptr<Frame> take_unused(Peer& peer);
  static void give_back(Peer& peer, std::unique_ptr<Frame> frame);
  void expect(const ExecutionContext& context, int peer);

  std::unique_ptr<Transport> carrier_;
  Call call_;
  std::vector<Peer> peers_;
  bool closed_ = false;
};

}  // namespace dltrain::comm
