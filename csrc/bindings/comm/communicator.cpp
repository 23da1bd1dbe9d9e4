#include "bindings/comm/communicator.h"

#include <ATen/ThreadLocalState.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/interrupt.h"

namespace dltrain::bindings {

namespace {

// The value of a Python hook's future must be a Python object. This one is made under the GIL when the work is submitted, so that the
// worker completes the future without it.
class TensorHolder final : public c10::ivalue::PyObjectHolder {
 public:
  explicit TensorHolder(py::object tensor) : tensor_(std::move(tensor)) {}
  ~TensorHolder() override {
    py::gil_scoped_acquire gil;
    tensor_ = py::object();
  }

  PyObject* getPyObject() override { return tensor_.ptr(); }
  c10::InferredType tryToInferType() override { return c10::InferredType(c10::TensorType::get()); }
  c10::IValue toIValue(const c10::TypePtr&, std::optional<int32_t>) override { return unpacked(); }
  std::string toStr() override { return "tensor"; }
  std::vector<at::Tensor> extractTensors() override { return {unpacked()}; }

 private:
  at::Tensor unpacked() const { return THPVariable_Unpack(tensor_.ptr()); }
  py::object tensor_;
};

// The task as one of the calling thread's, for the profiler, say, also where the worker does it; mostly nobody looks.
template <class Task>
auto as_caller(Task task) {
  std::optional<at::ThreadLocalState> observed;
  if (at::hasThreadLocalCallbacks()) observed.emplace();
  return [observed = std::move(observed), task = std::move(task)](const auto&... arguments) {
    std::optional<at::ThreadLocalStateGuard> guard;
    if (observed) guard.emplace(*observed);
    task(arguments...);
  };
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Work> work, const c10::Device& device) : device_(device), work_(std::move(work)) {
  if constexpr (built_with_cuda) {
    if (device.is_cuda()) stream_queue_ = std::make_shared<cuda::StreamQueue>(cuda_side_place(device));
  }
}

Communicator::~Communicator() {
  if (is_forked()) {  // what would be joined, told and closed is the parent's
    new auto(std::move(work_));
    new auto(std::move(stream_queue_));
    queue_.release();
    return;
  }
  // The worker and the backend's threads may need the GIL to let go of a tensor.
  py::gil_scoped_release no_gil;
  close();
  work_.reset();
  stream_queue_.reset();
}

void Communicator::check(const at::Tensor& tensor, const CollectiveOptions& options) const {
  if (const std::string reason = work_->group().failure(); !reason.empty()) C10_THROW_ERROR(DistBackendError, reason);
  const char* const name = comm::name(options.call.collective);
  TORCH_CHECK(
      !queue_->in_worker(), name,
      ": called by a callback of this communicator's own work. That runs on the thread that would do the work, and at another point "
      "of the order on every rank; wait for the work, then call");
  TORCH_CHECK_VALUE(options.call.collective == comm::Collective::all_reduce || !work_->group().is_in_two_levels(), name,
                    ": expected a communicator with ranks_per_host=1, got one of two levels");
  const comm::Executor& executor = work_->group().across();
  options.check(tensor, device_, executor.rank(), executor.world_size());
}

void Communicator::run_without_gil(const at::Tensor& tensor, const CollectiveOptions& options) {
  const Place caller = caller_place(device_);
  if constexpr (built_with_cuda) {
    if (stream_queue_) {
      return stream_queue_->run(caller, [&](const Place& side) {
        const OnStream current(side);
        work_->run(side, tensor, options);
      });
    }
  }
  queue_->run(as_caller([&] { work_->run(caller, tensor, options); }));
}

void Communicator::run(const at::Tensor& tensor, const CollectiveOptions& options) {
  check(tensor, options);
  options.changed(tensor);
  interruptibly([&] { run_without_gil(tensor, options); });
}

void Communicator::wait(const torch::jit::PythonFutureWrapper& future) {
  interruptibly([&] { future.fut->wait(); });
}

void Communicator::interruptibly(const std::function<void()>& wait) {
  const Interruptible interruptible([this] { close(); });
  try {
    py::gil_scoped_release no_gil;
    wait();
  } catch (const c10::Error&) {
    Interruptible::check();
    throw;
  }
  Interruptible::check();
}

std::shared_ptr<torch::jit::PythonFutureWrapper> Communicator::submit(py::object object, const CollectiveOptions& options) {
  const auto tensor = object.cast<at::Tensor>();
  check(tensor, options);
  options.changed(tensor);
  const std::vector<c10::Device> devices(device_.is_cuda() ? 1 : 0, device_);
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::PyObjectType::get(), devices);
  c10::IValue value(c10::intrusive_ptr<c10::ivalue::PyObjectHolder>(
      c10::make_intrusive<TensorHolder>(options.result(tensor).is_same(tensor) ? std::move(object) : py::cast(*options.share))));
  const auto task =
      as_caller([work = work_, tensor, options, future, value = std::move(value), submitted = Clock::now()](const Place& place) {
        try {
          const int64_t sent = work->group().wire_bytes();
          if (options.bucket) options.bucket->started(submitted);
          work->run(place, tensor, options);
          if (options.bucket) options.bucket->ended(submitted, work->group().wire_bytes() - sent);
        } catch (...) {
          future->setErrorIfNeeded(std::current_exception());
          return;
        }
        try {
          future->markCompleted(value);
        } catch (const c10::Error&) {
          // The user has completed it.
        }
      });
  auto out = std::make_shared<torch::jit::PythonFutureWrapper>(future);
  py::gil_scoped_release no_gil;
  if constexpr (built_with_cuda) {
    if (stream_queue_) {
      stream_queue_->submit(caller_place(device_), [&](const Place& side) {
        const OnStream current(side);  // the future's events are recorded there
        task(side);
        cuda_keep_for(side, tensor);
        if (options.share) cuda_keep_for(side, *options.share);
        options.feedback.keep_for(side);
        if (options.bucket) options.bucket->keep_for(side);
      });
      return out;
    }
  }
  // Backward has the other cores busy: a team of threads would gain nothing here.
  queue_->submit([task] { task(Place{serial_for}); });
  return out;
}

void Communicator::close() {
  if (is_forked()) return;
  const std::string reason = "the communicator was closed";
  work_->group().end(reason);
  queue_->close();
  work_->group().close();
}

Communicator::Stats Communicator::stats() const {
  const comm::Communicator& group = work_->group();
  return {group.calls(), group.wire_bytes(), group.inside_bytes()};
}

void Communicator::drain() {
  if (!is_forked()) work_->group().drain();
}

}  // namespace dltrain::bindings
