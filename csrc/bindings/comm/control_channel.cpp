#include "bindings/comm/control_channel.h"

#include <ATen/ops/from_blob.h>

#include <chrono>
#include <exception>
#include <thread>
#include <type_traits>

namespace dltrain::bindings {

namespace {

static_assert(std::is_trivially_copyable_v<comm::ControlMessage>);

std::vector<at::Tensor> bytes_of(comm::ControlMessage& notice) { return {at::from_blob(&notice, {sizeof notice}, at::kByte)}; }

}  // namespace

GlooControlChannel::GlooControlChannel(c10::intrusive_ptr<c10d::Backend> backend)
    : rank_(backend->getRank()), world_size_(backend->getSize()), backend_(std::move(backend)) {}

bool GlooControlChannel::send(int peer, const comm::ControlMessage& notice) noexcept {
  std::lock_guard lock(mutex_);
  if (!backend_) return true;
  sent_.push_back({notice, {}});
  try {
    auto tensors = bytes_of(sent_.back().notice);
    sent_.back().work = backend_->send(tensors, peer, 0);
    return true;
  } catch (const std::exception&) {
    sent_.pop_back();
    return false;
  }
}

std::optional<comm::ControlChannel::Received> GlooControlChannel::receive() {
  constexpr auto for_ever = std::chrono::hours(24 * 365);  // without one it would be the backend's own
  constexpr auto pause = std::chrono::milliseconds(10);
  for (;;) {
    try {
      const auto work = post_receive();
      if (!work) return {};
      if (work->wait(for_ever)) return Received{work->sourceRank(), received_};
    } catch (const std::exception&) {
      std::this_thread::sleep_for(pause);  // a peer has left that was about to send, or all have
    }
  }
}

// Null once closed.
c10::intrusive_ptr<c10d::Work> GlooControlChannel::post_receive() {
  std::lock_guard lock(mutex_);
  receiving_.reset();
  if (!backend_) return {};
  auto tensors = bytes_of(received_);
  return receiving_ = backend_->recvAnysource(tensors, 0);
}

// What is still to be sent is dropped: a peer that is stopped would never take it.
void GlooControlChannel::close() noexcept {
  std::lock_guard lock(mutex_);
  if (receiving_) receiving_->abort();
  receiving_.reset();
  sent_.clear();
  backend_.reset();
}

}  // namespace dltrain::bindings
