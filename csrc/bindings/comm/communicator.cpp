#include "bindings/comm/communicator.h"

#include <ATen/ThreadLocalState.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/interrupt.h"
#include "core/check.h"

namespace dltrain::bindings {

namespace {

// The value of a Python hook's future must be a Python object: a tensor, or a list of one. This holder is made with the GIL when the work
// is submitted, so that the worker completes the future without the GIL.
class ResultHolder final : public c10::ivalue::PyObjectHolder {
 public:
  ResultHolder(py::object value, at::Tensor tensor) : value_(std::move(value)), tensor_(std::move(tensor)) {}
  ~ResultHolder() override {
    py::gil_scoped_acquire gil;
    value_ = py::object();
  }

  PyObject* getPyObject() override { return value_.ptr(); }
  c10::InferredType tryToInferType() override {
    return is_list() ? c10::InferredType(c10::ListType::ofTensors()) : c10::InferredType(c10::TensorType::get());
  }
  c10::IValue toIValue(const c10::TypePtr&, std::optional<int32_t>) override {
    return is_list() ? c10::IValue(extractTensors()) : c10::IValue(tensor_);
  }
  std::string toStr() override { return is_list() ? "list of a tensor" : "tensor"; }
  std::vector<at::Tensor> extractTensors() override { return {tensor_}; }

 private:
  bool is_list() const { return PyList_Check(value_.ptr()); }

  py::object value_;
  const at::Tensor tensor_;
};

// Returns whether the future completes in time.
bool completes(const c10::intrusive_ptr<c10::ivalue::Future>& future, std::chrono::duration<double> timeout) {
  struct Completion {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_reached = false;
  };
  const auto completion = std::make_shared<Completion>();  // the callback may run after this wait has ended
  future->addCallback(
      [completion](c10::ivalue::Future&) {
        const std::lock_guard lock(completion->mutex);
        completion->is_reached = true;
        completion->changed.notify_all();
      },
      /*uses_future=*/false);
  std::unique_lock lock(completion->mutex);
  return completion->changed.wait_for(lock, timeout, [&] { return completion->is_reached; });
}

// Makes the task run with the caller's thread-local state, e.g. for the profiler, if there are thread-local callbacks.
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

Communicator::Communicator(std::shared_ptr<TensorCollectives> work, const c10::Device& device) : device_(device), work_(std::move(work)) {
  if constexpr (built_with_cuda) {
    if (device.is_cuda()) stream_queue_ = std::make_shared<cuda::StreamQueue>(cuda_side_context(device));
  }
}

Communicator::~Communicator() {
  if (is_forked()) {  // the threads, the peers and the connections are the parent's, so nothing is destroyed
    new auto(std::move(work_));
    new auto(std::move(stream_queue_));
    queue_.release();
    return;
  }
  // The worker and the backend's threads may need the GIL to release a tensor.
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
      ": called by a callback of this communicator's own work. A callback runs in the worker's thread, and at a different position in "
      "the order of calls on every rank; wait for the work, then call");
  TORCH_CHECK_VALUE(options.call.collective == comm::Collective::all_reduce || !work_->group().is_in_two_levels(), name,
                    ": expected a communicator with ranks_per_host=1, got one of two levels");
  TORCH_CHECK_VALUE((options.minus.empty() && !options.message) || !work_->group().is_in_two_levels(),
                    "minus, message: expected a communicator with ranks_per_host=1, got one of two levels");
  const comm::Executor& executor = work_->group().across();
  options.check(tensor, device_, executor.rank(), executor.world_size());
}

void Communicator::work(TensorCollectives& by, const ExecutionContext& context, const at::Tensor& tensor, const CollectiveOptions& options,
                        Clock::time_point submitted) {
  const int64_t sent = by.group().wire_bytes();
  if (options.bucket) options.bucket->started(submitted);
  by.run(context, tensor, options);
  if (options.bucket) options.bucket->ended(submitted, by.group().wire_bytes() - sent);
}

void Communicator::run_without_gil(const at::Tensor& tensor, const CollectiveOptions& options) {
  const ExecutionContext caller = caller_context(device_);
  const auto submitted = Clock::now();
  if constexpr (built_with_cuda) {
    if (stream_queue_) {
      return stream_queue_->run(caller, [&](const ExecutionContext& side) {
        const OnStream current(side);
        work(*work_, side, tensor, options, submitted);
      });
    }
  }
  give([&](Queue& queue) { queue.run(as_caller([&] { work(*work_, caller, tensor, options, submitted); })); });
}

void Communicator::give(const std::function<void(Queue&)>& call) {
  try {
    call(*queue_);
  } catch (const Queue::Closed&) {
    C10_THROW_ERROR(DistBackendError, work_->group().failure());
  }
}

void Communicator::run(const at::Tensor& tensor, const CollectiveOptions& options) {
  check(tensor, options);
  options.changed(tensor);
  interruptibly([&] { run_without_gil(tensor, options); });
}

void Communicator::wait(const torch::jit::PythonFutureWrapper& future, std::optional<double> timeout) {
  interruptibly([&] {
    if (timeout && !completes(future.fut, std::chrono::duration<double>(*timeout))) {
      C10_THROW_ERROR(DistBackendError, text("wait: the work was not complete after ", *timeout, " s; it goes on"));
    }
    future.fut->wait();
  });
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
  const at::Tensor& written = options.result(tensor);
  py::object result = written.is_same(tensor) ? std::move(object) : py::cast(written);
  if (!options.bucket) {
    py::list list;
    list.append(std::move(result));
    result = std::move(list);
  }
  c10::IValue value(c10::intrusive_ptr<c10::ivalue::PyObjectHolder>(c10::make_intrusive<ResultHolder>(std::move(result), written)));
  const auto task =
      as_caller([by = work_, tensor, options, future, value = std::move(value), submitted = Clock::now()](const ExecutionContext& context) {
        try {
          work(*by, context, tensor, options, submitted);
        } catch (...) {
          future->setErrorIfNeeded(std::current_exception());
          return;
        }
        try {
          future->markCompleted(value);
        } catch (const c10::Error&) {
          // The user has already completed it.
        }
      });
  auto out = std::make_shared<torch::jit::PythonFutureWrapper>(future);
  py::gil_scoped_release no_gil;
  if constexpr (built_with_cuda) {
    if (stream_queue_) {
      stream_queue_->submit(caller_context(device_), [&](const ExecutionContext& side) {
        const OnStream current(side);  // the future records its events on the current stream
        task(side);
        cuda_keep_for(side, tensor);
        if (options.shard) cuda_keep_for(side, *options.shard);
        for (const at::Tensor& each : options.minus) cuda_keep_for(side, each);
        if (options.message) cuda_keep_for(side, *options.message);
        options.feedback.keep_for(side);
        if (options.bucket) options.bucket->keep_for(side);
      });
      return out;
    }
  }
  // The backward pass keeps the other cores busy, so more threads would gain nothing here.
  give([&](Queue& queue) { queue.submit([task] { task(ExecutionContext{serial_for}); }); });
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
  const auto& [nanoseconds, tensor_bytes, bus_bytes] = work_->done();
  return {group.calls(), group.wire_bytes(), group.inside_bytes(), static_cast<double>(nanoseconds) * 1e-9, tensor_bytes, bus_bytes};
}

std::optional<int> Communicator::culprit() const { return work_->group().culprit(); }

int64_t Communicator::segment_bytes() const { return work_->group().across().segment_bytes(); }

std::string Communicator::drain() {
  if (is_forked()) return {};
  work_->group().drain();
  return work_->group().failure();
}

}  // namespace dltrain::bindings
