#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace dltrain::comm {

// Puts messages into envelopes that say to which call they belong, so that ranks that disagree find out. FramedTransport have one size, and
// receives for some are always posted: nothing unexpected can come in too long, and a small message finds its receiver ready. What does
// not fit follows as a message of its own, under a tag made of the call, which only ranks that agree have in common; and once a peer has
// had an envelope of the call, the tag is all that such a message needs.
//
//   | Header | message of up to 64 KiB | stamp |        or        | Header | stamp |   and then the message
//
// For memory of the CPU.
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
    int64_t sent = 0, received = 0;               // envelopes
    int64_t told = -1, heard = -1;                // the latest call that one has gone out, or come in, for
    std::deque<std::unique_ptr<Frame>> expected;  // posted, for messages that are yet to be asked for
    std::vector<std::unique_ptr<Frame>> empty;
  };

  static std::unique_ptr<Frame> empty_one(Peer& peer);
  static void give_back(Peer& peer, std::unique_ptr<Frame> frame);
  void expect(const ExecutionContext& context, int peer);

  std::unique_ptr<Transport> carrier_;
  Call call_;
  std::vector<Peer> peers_;
  bool closed_ = false;
};

}  // namespace dltrain::comm
