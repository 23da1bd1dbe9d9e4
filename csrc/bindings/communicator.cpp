#include "bindings/communicator.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/c10d_transport.h"
#include "bindings/module.h"
#include "bindings/place.h"
#include "comm/envelopes.h"
#include "core/check.h"

namespace dltrain::bindings {

namespace {

bool is_one_of(at::ScalarType type, std::initializer_list<at::ScalarType> types) {
  return std::find(types.begin(), types.end(), type) != types.end();
}

// Plans sum in fp32. What that cannot hold is left to the backend's own all-reduce.
bool fits_plans(at::ScalarType type) { return is_one_of(type, {at::kFloat, at::kHalf, at::kBFloat16}); }
bool fits_backend(at::ScalarType type) {
  return fits_plans(type) || is_one_of(type, {at::kDouble, at::kByte, at::kChar, at::kInt, at::kLong});
}

void check_values(const at::Tensor& tensor, const AllReduceOptions& options) {
  check_plain(tensor, "tensor");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "tensor: expected a tensor on the CPU, got one on ", tensor.device());
  const at::ScalarType type = tensor.scalar_type();
  if (options.is_native(type)) {
    TORCH_CHECK_TYPE(fits_backend(type), "tensor: expected dtype float32, float16, bfloat16, float64, uint8, int8, int32 or int64, got ",
                     type);
    TORCH_CHECK_TYPE(!options.call.average || at::isFloatingType(type), "tensor: expected a floating dtype for op 'avg', got ", type);
  } else {
    TORCH_CHECK_TYPE(fits_plans(type), "tensor: expected dtype float32, float16 or bfloat16 for the algorithm ", options.call.algorithm,
                     " and the codec ", options.call.codec, " (others are for the algorithms auto and native with the codec raw), got ",
                     type);
  }
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                    "tensor: expected elements that each have a place of their own, got shape ", tensor.sizes(), " with strides ",
                    tensor.strides());
  if (options.residual) {
    TORCH_CHECK_VALUE(!options.is_native(type), "residual: expected none for the algorithm native");
    check_feedback(find_codec(options.call.codec), options.call.stochastic);
    std::vector<Argument> arguments = {{*options.residual, "residual", true}, {tensor, "tensor", true}};
    elements_of(arguments[0], tensor.device(), tensor.numel(), false);
    check_apart(arguments);
  }
}

void changed(const at::Tensor& tensor, const AllReduceOptions& options) {
  bindings::changed({{tensor, "tensor", true}});
  if (options.residual) bindings::changed({{*options.residual, "residual", true}});
}

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

}  // namespace

bool AllReduceOptions::is_native(at::ScalarType type) const {
  return call.algorithm == "native" || (call.algorithm == "auto" && call.codec == "raw" && !fits_plans(type));
}

Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::vector<int> global_ranks, std::chrono::milliseconds timeout)
    : work_(std::make_shared<Work>(std::make_unique<C10dTransport>(std::move(backend)), std::move(global_ranks), timeout)) {}

Communicator::Work::Work(std::unique_ptr<C10dTransport> transport, std::vector<int> global_ranks, std::chrono::milliseconds timeout)
    : connections(*transport),
      executor(std::make_unique<comm::Envelopes>(std::move(transport)), std::move(global_ranks)),
      timeout(timeout) {}

Communicator::~Communicator() {
  // The worker and the backend's threads may need the GIL to let go of a tensor.
  py::gil_scoped_release no_gil;
  close();
  work_.reset();
}

void Communicator::check(const at::Tensor& tensor, const AllReduceOptions& options) const {
  if (const std::string reason = work_->executor.failure(); !reason.empty()) C10_THROW_ERROR(DistBackendError, reason);
  TORCH_CHECK(
      !queue_.in_worker(),
      "all_reduce: called by a callback of this communicator's own work. That runs on the thread that would do the work, and at another "
      "point of the order on every rank; wait for the work, then call");
  comm::check_names(options.call.algorithm, options.call.codec);
  check_values(tensor, options);
}

// Errors of the peers reach Python as torch.distributed.DistBackendError.
void Communicator::Work::all_reduce(const Place& place, const at::Tensor& tensor, const AllReduceOptions& options) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor dense = tensor.contiguous();
  try {
    if (options.is_native(tensor.scalar_type())) {
      all_reduce_natively(dense, options.call.average);
    } else {
      comm::AllReduce call = options.call;
      call.timeout = timeout;
      if (options.residual) call.residual = {options.residual->mutable_data_ptr(), dtype_of(*options.residual)};
      executor.all_reduce(place, {dense.mutable_data_ptr(), dtype_of(dense)}, dense.numel(), call);
    }
  } catch (const comm::AllReduceError& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  if (!dense.is_same(tensor)) tensor.copy_(dense);
}

// Gloo ends the process if ranks disagree, so that is found out first.
void Communicator::Work::all_reduce_natively(at::Tensor tensor, bool average) {
  comm::Call call;
  call.algorithm = comm::Call::native;
  call.numel = tensor.numel();
  call.average = average;
  const std::string type = c10::toString(tensor.scalar_type());
  type.copy(call.type.data(), call.type.size() - 1);
  const comm::Deadline deadline = comm::Clock::now() + timeout;
  executor.meet(call, timeout);
  if (tensor.numel() == 0) return;
  if (average) tensor.div_(executor.world_size());
  try {
    connections.all_reduce(std::move(tensor), deadline, [this] { return !executor.failure().empty(); });
  } catch (const comm::TransportError& error) {
    executor.abort(text("all_reduce with native on rank ", executor.global_rank(), " in a group of ", executor.world_size(), " (deadline ",
                        std::chrono::duration<double>(timeout).count(), " s): ", error.what()));
    executor.close();
    throw comm::AllReduceError(executor.failure());
  }
}

void Communicator::all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) {
  check(tensor, options);
  changed(tensor, options);
  py::gil_scoped_release no_gil;
  queue_.run([&] { work_->all_reduce(caller_place(tensor.device()), tensor, options); });
}

std::shared_ptr<torch::jit::PythonFutureWrapper> Communicator::submit(py::object object, const AllReduceOptions& options) {
  const auto tensor = object.cast<at::Tensor>();
  check(tensor, options);
  changed(tensor, options);
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::PyObjectType::get());
  c10::IValue value(c10::intrusive_ptr<c10::ivalue::PyObjectHolder>(c10::make_intrusive<TensorHolder>(std::move(object))));
  py::gil_scoped_release no_gil;
  queue_.submit([work = work_, tensor, options, future, value = std::move(value)] {
    try {
      // Backward has the other cores busy: a team of threads would gain nothing here.
      work->all_reduce(Place{serial_for}, tensor, options);
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
  return std::make_shared<torch::jit::PythonFutureWrapper>(future);
}

void Communicator::close() {
  work_->executor.abort("the communicator was closed");
  queue_.close();
  work_->executor.close();
}

namespace {

// A method of the tensor and, by name, the options.
template <class Method>
auto with_options(Method method) {
  return [method](Communicator& self, py::object tensor, const std::string& algorithm, const std::string& codec, bool average, int segments,
                  std::optional<at::Tensor> residual, bool stochastic, uint64_t seed, std::optional<uint32_t> step) {
    AllReduceOptions options;
    options.call.algorithm = algorithm;
    options.call.codec = codec;
    options.call.average = average;
    options.call.segments = segments;
    options.call.stochastic = stochastic;
    options.call.seed = seed;
    options.call.step = step;
    options.residual = std::move(residual);
    return method(self, std::move(tensor), options);
  };
}

template <class Class, class Function>
void def_with_options(Class& communicator, const char* name, Function method) {
  communicator.def(name, with_options(method), py::arg("tensor"), py::kw_only(), py::arg("algorithm"), py::arg("codec"), py::arg("average"),
                   py::arg("segments") = 0, py::arg("residual") = py::none(), py::arg("stochastic") = false, py::arg("seed") = 0,
                   py::arg("step") = py::none());
}

}  // namespace

void bind_communicator(py::module_& module) {
  module.def("check_names", &comm::check_names);
  module.def(
      "timeout_of",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        return std::chrono::duration<double>(group->getDefaultBackend()->getBackendOptions()->timeout).count();
      },
      "The seconds that a group's own collectives wait.");
  py::class_<Communicator> communicator(module, "Communicator");
  communicator
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> backend, std::vector<int> global_ranks, double timeout) {
             const std::chrono::milliseconds milliseconds(static_cast<int64_t>(timeout * 1e3));
             return std::make_unique<Communicator>(std::move(backend), std::move(global_ranks), milliseconds);
           }),
           py::arg("backend"), py::arg("global_ranks"), py::arg("timeout"))
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>())
      .def("stats", [](const Communicator& self) {
        const auto stats = self.stats();
        py::dict out;
        out["calls"] = stats.calls;
        out["wire_bytes"] = stats.wire_bytes;
        return out;
      });
  def_with_options(communicator, "all_reduce", [](Communicator& self, const py::object& tensor, const AllReduceOptions& options) {
    self.all_reduce(tensor.cast<at::Tensor>(), options);
  });
  def_with_options(communicator, "submit", [](Communicator& self, py::object tensor, const AllReduceOptions& options) {
    return self.submit(std::move(tensor), options);
  });
}

}  // namespace dltrain::bindings
