#include "bindings/comm/communicator.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
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

void Communicator::check(const at::Tensor& tensor, const CollectiveOptions& options) const {
  if (const std::string reason = work_->failure(); !reason.empty()) C10_THROW_ERROR(DistBackendError, reason);
  const char* const name = comm::name(options.call.collective);
  TORCH_CHECK(
      !queue_->in_worker(), name,
      ": called by a callback of this communicator's own work. That runs on the thread that would do the work, and at another point "
      "of the order on every rank; wait for the work, then call");
  TORCH_CHECK_VALUE(options.call.collective == comm::Collective::all_reduce || !work_->inside, name,
                    ": expected a communicator with ranks_per_host=1, got one of two levels");
  const comm::Executor& executor = work_->across->executor();
  options.check(tensor, device_, executor.rank(), executor.world_size());
}

// In a range of the profiler that torch's own collectives have, too, so that its viewers know what it is.
void Communicator::Work::run(const Place& place, const at::Tensor& tensor, const CollectiveOptions& options) {
  if (!at::hasCallbacks()) return attempt(place, tensor, options);
  const bool gathers = options.call.collective == comm::Collective::all_gather;
  const at::Tensor &in = gathers ? *options.share : tensor, &out = options.result(tensor);
  const bool all_reduces = options.call.collective == comm::Collective::all_reduce;
  const int world_size = static_cast<int>(members.ranks.size());
  const std::vector<at::Tensor> inputs = {in}, outputs = {out};
  RECORD_PARAM_COMMS_DATA(std::make_tuple(calls.load(), false), std::make_tuple(members.name, members.description), inputs, outputs,
                          members.rank, all_reduces ? "allreduce" : comm::name(options.call.collective), in.numel(), out.numel(),
                          tensor.scalar_type(), std::vector<int64_t>(), std::vector<int64_t>(), members.ranks[0], stride_of(members.ranks),
                          world_size);
  attempt(place, tensor, options);
}

// Errors of the peers reach Python as torch.distributed.DistBackendError. They end all levels: peers of one may wait in the other.
void Communicator::Work::attempt(const Place& place, const at::Tensor& tensor, const CollectiveOptions& options) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor dense = tensor.contiguous();
  if (lookout) lookout->begin();
  try {
    comm::Options call = options.call;
    call.timeout = timeout;
    call.measures = measures && !options.bucket && !place.on_cuda();  // a bucket's bits may not depend on noise
    call.feedback = options.feedback.elements();
    if (options.bucket) {
      call.layout = options.bucket->layout();
      call.observer = options.bucket.get();
    }
    if (options.share) {
      run_shares(place, dense, options, call);
    } else if (options.is_verbatim()) {
      carry(place, dense, {{0, dense.numel()}}, call);
    } else if (call.collective == comm::Collective::all_reduce) {
      all_reduce(place, dense, options, call);
    } else {
      run_plan(place, dense, call);
    }
  } catch (const comm::CollectiveError& error) {
    abort(error.what());
    close();
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  if (!dense.is_same(tensor) && options.result(tensor).is_same(tensor)) tensor.copy_(dense);
  if (options.bucket) options.bucket->add_up(place, tensor);
  ++calls;
}

void Communicator::Work::all_reduce(const Place& place, const at::Tensor& tensor, const CollectiveOptions& options,
                                    const comm::Options& call) {
  if (options.is_native(tensor.scalar_type())) return all_reduce_natively(place, tensor, call.average);
  if (inside) return all_reduce_in_two_levels(place, tensor, call);
  run_plan(place, tensor, call);
}

void Communicator::Work::run_plan(const Place& place, const at::Tensor& tensor, const comm::Options& call) {
  across->executor().run(place, {tensor.mutable_data_ptr(), dtype_of(tensor)}, tensor.numel(), call);
}

// A reduce-scatter or an all-gather of a tensor that is dense.
void Communicator::Work::run_shares(const Place& place, const at::Tensor& tensor, const CollectiveOptions& options, comm::Options& call) {
  const at::Tensor& share = *options.share;
  call.shares = options.shares(tensor.numel(), across->executor().world_size());
  if (call.collective == comm::Collective::reduce_scatter) {
    const at::Tensor dense = share.is_contiguous() ? share : at::empty_like(share, at::MemoryFormat::Contiguous);
    call.share = {dense.mutable_data_ptr(), dtype_of(dense)};
    run_plan(place, tensor, call);
    if (!dense.is_same(share)) share.copy_(dense);
    return;
  }
  const auto [first, count] = call.shares[across->executor().rank()];
  const at::Tensor own = tensor.flatten().narrow(0, first, count);
  if (own.const_data_ptr() != share.const_data_ptr()) own.copy_(share.flatten());
  if (options.is_verbatim()) return carry(place, tensor, call.shares, call);
  run_plan(place, tensor, call);
}

// Moves elements of any type as words of four bytes, each share by itself; in memory of its own where they do not come out even.
void Communicator::Work::carry(const Place& place, const at::Tensor& tensor, std::vector<Span> shares, comm::Options call) {
  constexpr int64_t word = sizeof(float);
  const int64_t size = tensor.element_size();
  const auto bytes_of = [size](const Span& share) { return Span{share.first * size, share.count * size}; };
  const bool even = std::all_of(shares.begin(), shares.end(), [&](const Span& share) { return share.count * size % word == 0; });
  std::vector<Span> words;
  for (const Span& share : shares) {
    words.push_back({words.empty() ? 0 : words.back().first + words.back().count, (bytes_of(share).count + word - 1) / word});
  }
  const int64_t numel = words.back().first + words.back().count;
  const auto run_words = [&](void* data) {
    if (comm::has_owners(call.collective)) call.shares = words;
    across->executor().run(place, {data}, numel, call);
  };
  if (even) return run_words(tensor.mutable_data_ptr());
  const at::Tensor bytes = tensor.flatten().view(at::kByte), padded = at::zeros({numel * word}, bytes.options());
  const auto each = [&](auto&& copy) {
    for (size_t i = 0; i < shares.size(); ++i) {
      const auto [first, count] = bytes_of(shares[i]);
      copy(bytes.narrow(0, first, count), padded.narrow(0, words[i].first * word, count));
    }
  };
  each([](const at::Tensor& theirs, const at::Tensor& ours) { ours.copy_(theirs); });
  run_words(padded.mutable_data_ptr());
  each([](const at::Tensor& theirs, const at::Tensor& ours) { theirs.copy_(ours); });
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
void Communicator::Work::all_reduce_in_two_levels(const Place& place, const at::Tensor& tensor, const comm::Options& call) {
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
