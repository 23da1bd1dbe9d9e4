#include "bindings/communicator.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/c10d_transport.h"
#include "bindings/module.h"
#include "bindings/place.h"

namespace dltrain::bindings {

namespace {

void check_values(const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch(),
                   "tensor: expected a plain dense tensor, got layout ", tensor.layout(), " (", tensor.toString(), ")");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "tensor: expected a tensor on the CPU, got one on ", tensor.device());
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, "tensor: expected dtype float32, got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                    "tensor: expected elements that each have a place of their own, got shape ", tensor.sizes(), " with strides ",
                    tensor.strides());
}

// Errors of the peers reach Python as torch.distributed.DistBackendError.
void reduce(comm::Executor& executor, const Place& place, const at::Tensor& tensor, const comm::AllReduce& call) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor dense = tensor.contiguous();
  try {
    executor.all_reduce(place, dense.mutable_data_ptr<float>(), dense.numel(), call);
  } catch (const comm::AllReduceError& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  if (!dense.is_same(tensor)) tensor.copy_(dense);
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

Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::vector<int> global_ranks, std::chrono::milliseconds timeout)
    : executor_(std::make_shared<comm::Executor>(std::make_unique<C10dTransport>(std::move(backend)), std::move(global_ranks))),
      timeout_(timeout) {}

Communicator::~Communicator() {
  // The worker may need the GIL to let go of a tensor.
  py::gil_scoped_release no_gil;
  close();
}

comm::AllReduce Communicator::call(const std::string& algorithm, const std::string& codec, bool average) const {
  if (const std::string reason = executor_->failure(); !reason.empty()) C10_THROW_ERROR(DistBackendError, reason);
  TORCH_CHECK(
      !queue_.in_worker(),
      "all_reduce: called by a callback of this communicator's own work. That runs on the thread that would do the work, and at another "
      "point of the order on every rank; wait for the work, then call");
  comm::check_names(algorithm, codec);
  return {algorithm, codec, average, 0, timeout_};
}

void Communicator::all_reduce(const at::Tensor& tensor, const std::string& algorithm, const std::string& codec, bool average) {
  check_values(tensor);
  const auto call = this->call(algorithm, codec, average);
  py::gil_scoped_release no_gil;
  queue_.run([&] { reduce(*executor_, caller_place(tensor.device()), tensor, call); });
}

std::shared_ptr<torch::jit::PythonFutureWrapper> Communicator::submit(py::object object, const std::string& algorithm,
                                                                      const std::string& codec, bool average) {
  const auto tensor = object.cast<at::Tensor>();
  check_values(tensor);
  const auto call = this->call(algorithm, codec, average);
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::PyObjectType::get());
  c10::IValue value(c10::intrusive_ptr<c10::ivalue::PyObjectHolder>(c10::make_intrusive<TensorHolder>(std::move(object))));
  py::gil_scoped_release no_gil;
  queue_.submit([executor = executor_, tensor, call, future, value = std::move(value)] {
    try {
      // Backward has the other cores busy: a team of threads would gain nothing here.
      reduce(*executor, Place{serial_for}, tensor, call);
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
  executor_->abort("the communicator was closed");
  queue_.close();
}

void bind_communicator(py::module_& module) {
  module.def("check_names", &comm::check_names);
  module.def(
      "timeout_of",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        return std::chrono::duration<double>(group->getDefaultBackend()->getBackendOptions()->timeout).count();
      },
      "The seconds that a group's own collectives wait.");
  py::class_<Communicator>(module, "Communicator")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> backend, std::vector<int> global_ranks, double timeout) {
             const std::chrono::milliseconds milliseconds(static_cast<int64_t>(timeout * 1e3));
             return std::make_unique<Communicator>(std::move(backend), std::move(global_ranks), milliseconds);
           }),
           py::arg("backend"), py::arg("global_ranks"), py::arg("timeout"))
      .def("all_reduce", &Communicator::all_reduce, py::arg("tensor"), py::arg("algorithm"), py::arg("codec"), py::arg("average"))
      .def("submit", &Communicator::submit, py::arg("tensor"), py::arg("algorithm"), py::arg("codec"), py::arg("average"))
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>())
      .def("stats", [](const Communicator& self) {
        const auto stats = self.stats();
        py::dict out;
        out["calls"] = stats.calls;
        out["wire_bytes"] = stats.wire_bytes;
        return out;
      });
}

}  // namespace dltrain::bindings
