#include "bindings/comm/communicator.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/comm/channel.h"
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

// As torch has it: -1 where they are not evenly spaced.
int stride_of(const std::vector<int>& ranks) {
  if (ranks.size() < 2) return 0;
  const int stride = ranks[1] - ranks[0];
  for (size_t i = 2; i < ranks.size(); ++i) {
    if (ranks[i] - ranks[i - 1] != stride) return -1;
  }
  return stride;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Level> across, std::shared_ptr<Level> inside, const comm::Hosts& hosts,
                           c10::intrusive_ptr<c10d::Backend> control, Ranks members, const c10::Device& device,
                           std::chrono::milliseconds timeout, const comm::Patience& patience, bool measures)
    : device_(device),
      work_(std::make_shared<Work>(std::move(across), std::move(inside), hosts, std::move(control), std::move(members), timeout, patience,
                                   measures)) {
  if constexpr (built_with_cuda) {
    if (device.is_cuda()) stream_queue_ = std::make_shared<cuda::StreamQueue>(cuda_side_place(device));
  }
}

Communicator::Work::Work(std::shared_ptr<Level> across, std::shared_ptr<Level> inside, const comm::Hosts& hosts,
                         c10::intrusive_ptr<c10d::Backend> control, Ranks members, std::chrono::milliseconds timeout,
                         const comm::Patience& patience, bool measures)
    : members(std::move(members)),
      across(std::move(across)),
      inside(std::move(inside)),
      hosts(hosts),
      timeout(timeout),
      measures(measures) {
  if (this->inside) two_levels.emplace(this->inside->executor(), this->across->executor(), hosts);
  if (!control) return;
  lookout = std::make_shared<comm::Lookout>(
      std::make_unique<GlooChannel>(std::move(control)), this->members.ranks,
      comm::Lookout::Calls{[this] { return waiting(); }, [this](const std::string& finding) { give_up(finding); }}, patience);
  for (const auto& level : {this->across, this->inside}) {
    if (level) level->executor().set_lookout(lookout);
  }
}

Communicator::Work::~Work() {
  if (lookout) lookout->close();
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

void Communicator::check(const at::Tensor& tensor, const AllReduceOptions& options) const {
  if (const std::string reason = work_->failure(); !reason.empty()) C10_THROW_ERROR(DistBackendError, reason);
  TORCH_CHECK(
      !queue_->in_worker(),
      "all_reduce: called by a callback of this communicator's own work. That runs on the thread that would do the work, and at another "
      "point of the order on every rank; wait for the work, then call");
  TORCH_CHECK_VALUE(!options.share || !work_->inside,
                    "reduce_scatter: expected a communicator with ranks_per_host=1, got one of two levels");
  options.check(tensor, device_, work_->across->executor().world_size());
}

// In a range of the profiler that torch's own collectives have, too, so that its viewers know what it is.
void Communicator::Work::run(const Place& place, const at::Tensor& tensor, const AllReduceOptions& options) {
  if (!at::hasCallbacks()) return all_reduce(place, tensor, options);
  const at::Tensor& out = options.share ? *options.share : tensor;
  const int world_size = static_cast<int>(members.ranks.size());
  const std::vector<at::Tensor> inputs = {tensor}, outputs = {out};
  RECORD_PARAM_COMMS_DATA(std::make_tuple(calls.load(), false), std::make_tuple(members.name, members.description), inputs, outputs,
                          members.rank, options.share ? "reduce_scatter" : "allreduce", tensor.numel(), out.numel(), tensor.scalar_type(),
                          std::vector<int64_t>(), std::vector<int64_t>(), members.ranks[0], stride_of(members.ranks), world_size);
  all_reduce(place, tensor, options);
}

// Errors of the peers reach Python as torch.distributed.DistBackendError. They end all levels: peers of one may wait in the other.
void Communicator::Work::all_reduce(const Place& place, const at::Tensor& tensor, const AllReduceOptions& options) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor dense = tensor.contiguous();
  if (lookout) lookout->begin();
  try {
    if (options.is_native(tensor.scalar_type())) {
      all_reduce_natively(place, dense, options.call.average);
    } else {
      comm::AllReduce call = options.call;
      call.timeout = timeout;
      call.measures = measures && !options.bucket && !place.on_cuda();  // a bucket's bits may not depend on noise
      call.feedback = options.feedback.elements();
      if (options.bucket) {
        call.layout = options.bucket->layout();
        call.observer = options.bucket.get();
      }
      if (options.share) {
        reduce_scatter(place, dense, *options.share, call);
      } else if (inside) {
        all_reduce_in_two_levels(place, dense, call);
      } else {
        across->executor().all_reduce(place, {dense.mutable_data_ptr(), dtype_of(dense)}, dense.numel(), call);
      }
    }
  } catch (const comm::AllReduceError& error) {
    abort(error.what());
    close();
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  if (!dense.is_same(tensor) && !options.share) tensor.copy_(dense);
  if (options.bucket) options.bucket->add_up(place, tensor);
  ++calls;
}

void Communicator::Work::reduce_scatter(const Place& place, const at::Tensor& tensor, const at::Tensor& share,
                                        const comm::AllReduce& call) {
  const at::Tensor dense = share.is_contiguous() ? share : at::empty_like(share, at::MemoryFormat::Contiguous);
  across->executor().reduce_scatter(place, {dense.mutable_data_ptr(), dtype_of(dense)}, {tensor.mutable_data_ptr(), dtype_of(tensor)},
                                    tensor.numel(), call);
  if (!dense.is_same(share)) share.copy_(dense);
}

// In two levels each rank that has a share takes all of it across the hosts, and tells the ranks of its host that have none.
void Communicator::Work::all_reduce_natively(const Place& place, const at::Tensor& tensor, bool average) {
  if (!inside) return across->all_reduce_natively(place, tensor, average, timeout);
  if (average) tensor.div_(hosts.ranks);
  inside->all_reduce_natively(place, tensor, false, timeout);
  across->all_reduce_natively(place, tensor, false, timeout);
  if (inside->executor().world_size() == hosts.shares) return;
  if (inside->executor().rank() > 0) tensor.zero_();
  inside->all_reduce_natively(place, tensor, false, timeout);
}

// Over fp32, in which halves are added up.
void Communicator::Work::all_reduce_in_two_levels(const Place& place, const at::Tensor& tensor, const comm::AllReduce& call) {
  const at::Tensor sums = tensor.to(at::kFloat);  // the tensor itself, if it is that
  two_levels->all_reduce(place, sums.mutable_data_ptr<float>(), sums.numel(), call);
  if (!sums.is_same(tensor)) tensor.copy_(sums);
}

std::string Communicator::Work::failure() const {
  std::string reason = across->executor().failure();
  return reason.empty() && inside ? inside->executor().failure() : reason;
}

void Communicator::Work::refuse(const std::string& reason) {
  for (const auto& level : {across, inside}) {
    if (level) level->executor().refuse(reason);
  }
}

void Communicator::Work::abort(const std::string& reason) {
  for (const auto& level : {across, inside}) {
    if (level) level->executor().abort(reason);
  }
}

void Communicator::Work::end(const std::string& reason) {
  for (const auto& level : {across, inside}) {
    if (level) level->executor().end(reason);
  }
}

void Communicator::Work::give_up(const std::string& finding) {
  for (const auto& level : {across, inside}) {
    if (level) level->executor().give_up(finding);
  }
}

// In two levels either may wait, or both.
comm::Waiting Communicator::Work::waiting() const {
  comm::Waiting waiting = across->executor().waiting();
  if (!inside) return waiting;
  const comm::Waiting more = inside->executor().waiting();
  waiting.peers.insert(waiting.peers.end(), more.peers.begin(), more.peers.end());
  return waiting;
}

void Communicator::Work::close() {
  for (const auto& level : {across, inside}) {
    if (level) level->executor().close();
  }
}

void Communicator::all_reduce_without_gil(const at::Tensor& tensor, const AllReduceOptions& options) {
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

void Communicator::all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) {
  check(tensor, options);
  options.changed(tensor);
  interruptibly([&] { all_reduce_without_gil(tensor, options); });
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

std::shared_ptr<torch::jit::PythonFutureWrapper> Communicator::submit(py::object object, const AllReduceOptions& options) {
  const auto tensor = object.cast<at::Tensor>();
  check(tensor, options);
  options.changed(tensor);
  const std::vector<c10::Device> devices(device_.is_cuda() ? 1 : 0, device_);
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::PyObjectType::get(), devices);
  c10::IValue value(c10::intrusive_ptr<c10::ivalue::PyObjectHolder>(
      c10::make_intrusive<TensorHolder>(options.share ? py::cast(*options.share) : std::move(object))));
  const auto task =
      as_caller([work = work_, tensor, options, future, value = std::move(value), submitted = Clock::now()](const Place& place) {
        try {
          const int64_t sent = work->across->executor().wire_bytes();
          if (options.bucket) options.bucket->started(submitted);
          work->run(place, tensor, options);
          if (options.bucket) options.bucket->ended(submitted, work->across->executor().wire_bytes() - sent);
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
  // Before a call fails: nobody is told that this rank is well, and a call that asks for the culprit need not wait for an answer.
  work_->refuse(reason);
  if (work_->lookout) work_->lookout->close();
  work_->end(reason);
  queue_->close();
  work_->close();
}

Communicator::Stats Communicator::stats() const {
  const int64_t inside_bytes = work_->inside ? work_->inside->executor().wire_bytes() : 0;
  return {work_->calls, work_->across->executor().wire_bytes(), inside_bytes};
}

void Communicator::drain() {
  if (is_forked()) return;
  for (const auto& level : {work_->inside, work_->across}) {
    if (level) level->executor().drain();
  }
}

}  // namespace dltrain::bindings
