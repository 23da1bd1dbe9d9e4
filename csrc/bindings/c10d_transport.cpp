#include "bindings/c10d_transport.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <thread>
#include <utility>

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

// A wait of zero would mean no deadline at all.
std::chrono::milliseconds until(comm::Deadline deadline) {
  return std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - comm::Clock::now()), std::chrono::milliseconds(1));
}

class C10dRequest : public comm::Request {
 public:
  explicit C10dRequest(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  void wait(comm::Deadline deadline) override {
    guarded([&] {
      if (!work_->wait(until(deadline))) throw comm::TransportError("aborted");
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
  return guarded([&] { return std::make_unique<C10dRequest>(backend().send(tensors, peer, tag)); });
}

std::unique_ptr<comm::Request> C10dTransport::recv(const Place&, int peer, void* data, int64_t bytes, int tag) {
  auto tensors = bytes_at(data, bytes);
  return guarded([&] { return std::make_unique<C10dRequest>(backend().recv(tensors, peer, tag)); });
}

void C10dTransport::all_reduce(at::Tensor tensor, comm::Deadline deadline, const std::function<bool()>& given_up) {
  constexpr auto slice = std::chrono::milliseconds(50);
  std::vector<at::Tensor> tensors = {std::move(tensor)};
  guarded([&] {
    c10d::AllreduceOptions options;
    options.timeout = until(deadline);
    native_ = backend().allreduce(tensors, options);
    while (!native_->isCompleted()) {
      if (given_up()) throw comm::TransportError("given up");
      if (comm::Clock::now() > deadline + slice) throw comm::TransportError("nothing came");
      try {
        native_->wait(slice);
      } catch (const std::exception&) {
        continue;  // the slice is over, or the work has failed: the last wait says so
      }
    }
    native_->wait();
  });
}

void C10dTransport::close() noexcept {
  // The backend goes when its work has ended, which Gloo cannot break off.
  if (native_ && !native_->isCompleted()) {
    std::thread([backend = std::move(backend_)]() mutable { backend.reset(); }).detach();
  }
  backend_.reset();
}

c10d::Backend& C10dTransport::backend() const {
  if (!backend_) throw comm::TransportError("the connections were closed");
  return *backend_;
}

}  // namespace dltrain::bindings
