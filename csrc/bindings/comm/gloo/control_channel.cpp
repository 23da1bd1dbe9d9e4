#include "bindings/comm/gloo/control_channel.h"

#include <ATen/ops/from_blob.h>

#include <chrono>
#include <exception>
#include <thread>
#include <type_traits>

namespace dltrain::bindings {

namespace {

static_assert(std::is_trivially_copyable_v<comm::ControlMessage>);

std::vector<at::Tensor> bytes_of(comm::ControlMessage& message) { return {at::from_blob(&message, {sizeof message}, at::kByte)}; }

}  // namespace

GlooControlChannel::GlooControlChannel(c10::intrusive_ptr<c10d::Backend> backend)
    : rank_(backend->getRank()), world_size_(backend->getSize()), backend_(std::move(backend)) {}

bool GlooControlChannel::send(int peer, const comm::ControlMessage& message) noexcept {
  std::lock_guard lock(mutex_);
  if (!backend_) return true;
  sent_.push_back({message, {}});
  try {
    auto tensors = bytes_of(sent_.back().message);
    sent_.back().work = backend_->send(tensors, peer, 0);
    return true;
  } catch (const std::exception&) {
    sent_.pop_back();
    return false;
  }
}

std::optional<comm::ControlChannel::Received> GlooControlChannel::receive() {
  constexpr auto for_ever = std::chrono::hours(24 * 365);  // otherwise the backend's timeout would apply
  constexpr auto pause = std::chrono::milliseconds(10);
  for (;;) {
    try {
      const auto work = post_receive();
      if (!work) return {};
      if (work->wait(for_ever)) return Received{work->sourceRank(), received_};
    } catch (const std::exception&) {
      std::this_thread::sleep_for(pause);  // the peer that was about to send has left, or all peers have
    }
  }
}

// Null if the channel is closed.
c10::intrusive_ptr<c10d::Work> GlooControlChannel::post_receive() {
  std::lock_guard lock(mutex_);
  receiving_.reset();
  if (!backend_) return {};
  auto tensors = bytes_of(received_);
  return receiving_ = backend_->recvAnysource(tensors, 0);
}

// Messages that are not sent yet are dropped: a stopped process would never receive them.
void GlooControlChannel::close() noexcept {
  std::lock_guard lock(mutex_);
  if (receiving_) receiving_->abort();
  receiving_.reset();
  sent_.clear();
  backend_.reset();
}

}  // namespace dltrain::bindings
