#include "bindings/c10d_transport.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>

namespace dltrain::bindings {

namespace {

// Runs a call into c10d; whatever it throws becomes a TransportError with the first line of its text.
template <class Call>
auto guarded(Call&& call) {
  const auto first_line = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  try {
    return call();
  } catch (const comm::TransportError&) {
    throw;
  } catch (const c10::Error& error) {
    throw comm::TransportError(first_line(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    throw comm::TransportError(first_line(error.what()));
  }
}

class C10dRequest : public comm::Request {
 public:
  explicit C10dRequest(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  void wait(comm::Deadline deadline) override {
    guarded([&] {
      // A wait of zero would mean no deadline at all.
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - comm::Clock::now());
      if (!work_->wait(std::max(left, std::chrono::milliseconds(1)))) throw comm::TransportError("aborted");
    });
  }

  void abort() override { work_->abort(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

std::vector<at::Tensor> bytes_at(const void* data, int64_t bytes) { return {at::from_blob(const_cast<void*>(data), {bytes}, at::kByte)}; }

}  // namespace

std::unique_ptr<comm::Request> C10dTransport::send(const Place&, int peer, const void* data, int64_t bytes, int tag) {
  auto tensors = bytes_at(data, bytes);
  return guarded([&] { return std::make_unique<C10dRequest>(backend_->send(tensors, peer, tag)); });
}

std::unique_ptr<comm::Request> C10dTransport::recv(const Place&, int peer, void* data, int64_t bytes, int tag) {
  auto tensors = bytes_at(data, bytes);
  return guarded([&] { return std::make_unique<C10dRequest>(backend_->recv(tensors, peer, tag)); });
}

}  // namespace dltrain::bindings
