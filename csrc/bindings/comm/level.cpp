#include "bindings/comm/level.h"

#include <utility>

#include "bindings/module.h"
#include "comm/transport/framed_transport.h"
#include "comm/transport/nccl/transport.h"
#include "comm/transport/shm/processes.h"
#include "comm/transport/shm/transport.h"
#include "core/check.h"

namespace dltrain::bindings {

namespace {

comm::ScalarType scalar_type_of(at::ScalarType type) {
  switch (type) {
    case at::kChar: return comm::ScalarType::int8;
    case at::kByte: return comm::ScalarType::uint8;
    case at::kInt: return comm::ScalarType::int32;
    case at::kLong: return comm::ScalarType::int64;
    case at::kHalf: return comm::ScalarType::fp16;
    case at::kBFloat16: return comm::ScalarType::bf16;
    case at::kDouble: return comm::ScalarType::fp64;
    default: return comm::ScalarType::fp32;
  }
}

class SharedMemoryBesideGloo : public comm::shm::Transport {
 public:
  SharedMemoryBesideGloo(std::shared_ptr<comm::shm::Group> group, int rank, std::function<bool(int)> is_alive,
                         c10::intrusive_ptr<c10d::Backend> backend)
      : Transport(std::move(group), rank, std::move(is_alive)), gloo(std::move(backend), c10::Device(c10::kCPU)) {}

  void close() noexcept override {
    Transport::close();
    gloo.close();
  }

  C10dTransport gloo;  // for native all-reduces
};

}  // namespace

std::shared_ptr<Level> Level::over_backend(c10::intrusive_ptr<c10d::Backend> backend, const c10::Device& device,
                                           std::vector<int> global_ranks) {
  auto transport = std::make_unique<C10dTransport>(std::move(backend), device);
  if (device.is_cuda()) return std::shared_ptr<Level>(new Level(std::move(transport), std::move(global_ranks)));
  C10dTransport* const gloo = transport.get();
  return std::shared_ptr<Level>(new Level(std::make_unique<comm::FramedTransport>(std::move(transport)), std::move(global_ranks), gloo));
}

std::shared_ptr<Level> Level::over_shared_memory(std::shared_ptr<comm::shm::Group> group, int rank, const std::vector<int>& processes,
                                                 c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int> global_ranks) {
  const auto observed = std::make_shared<comm::shm::Processes>(processes);
  const auto is_alive = [observed](int peer) { return observed->is_alive(peer); };
  auto transport = std::make_unique<SharedMemoryBesideGloo>(std::move(group), rank, is_alive, std::move(gloo));
  C10dTransport* const native = &transport->gloo;
  return std::shared_ptr<Level>(new Level(std::move(transport), std::move(global_ranks), native));
}

std::shared_ptr<Level> Level::over_nccl(const std::string& unique_id, int rank, const c10::Device& device, std::vector<int> global_ranks,
                                        std::chrono::milliseconds timeout) {
  comm::nccl::UniqueId id;
  dltrain::check(unique_id.size() == sizeof id.bytes, "unique_id: expected ", sizeof id.bytes, " bytes, got ", unique_id.size());
  unique_id.copy(id.bytes, sizeof id.bytes);
  const int world_size = static_cast<int>(global_ranks.size());
  auto transport = std::make_unique<comm::nccl::Transport>(comm::nccl::Library::get(), id, rank, world_size,
                                                           device.is_cuda() ? device.index() : -1, timeout);
  return std::shared_ptr<Level>(new Level(std::move(transport), std::move(global_ranks)));
}

void Level::all_reduce_natively(const ExecutionContext& context, const at::Tensor& tensor, bool average,
                                std::chrono::milliseconds timeout) {
  if (gloo_) return all_reduce_by_gloo(tensor, average, timeout);
  executor_.all_reduce_natively(context, tensor.mutable_data_ptr(), tensor.numel(), scalar_type_of(tensor.scalar_type()), average, timeout);
}

// Gloo ends the process if the arguments differ between ranks, so a handshake compares them first.
void Level::all_reduce_by_gloo(at::Tensor tensor, bool average, std::chrono::milliseconds timeout) {
  comm::Call call;
  call.algorithm = comm::Call::native;
  call.numel = tensor.numel();
  call.average = average;
  const std::string type = c10::toString(tensor.scalar_type());
  type.copy(call.type.data(), call.type.size() - 1);
  const Deadline deadline = Clock::now() + timeout;
  executor_.handshake(call, timeout);
  if (tensor.numel() == 0) return;
  if (average) tensor.div_(executor_.world_size());
  executor_.all_reduce_natively(timeout, [&] { gloo_->all_reduce(tensor, deadline, [this] { return !executor_.failure().empty(); }); });
}

void bind_levels(py::module_& module) {
  const auto milliseconds = [](double seconds) { return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3)); };
  module.def("nccl_version", [] { return comm::nccl::Library::get().version_text(); }, "Raises RuntimeError if NCCL cannot be loaded.");
  module.def("nccl_unique_id", [] {
    const auto id = comm::nccl::make_unique_id(comm::nccl::Library::get());
    return py::bytes(id.bytes, sizeof id.bytes);
  });
  using SharedMemory = comm::shm::Group;
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(module, "SharedMemory")
      .def_static(
          "make", [](int world_size) { return std::make_shared<SharedMemory>(world_size); }, py::arg("world_size"))
      .def_static(
          "open", [](const std::string& address, int world_size) { return std::make_shared<SharedMemory>(address, world_size); },
          py::arg("address"), py::arg("world_size"))
      .def_property_readonly("address", &SharedMemory::address);
  py::class_<Level, std::shared_ptr<Level>>(module, "Level")
      .def_static("over_backend", &Level::over_backend, py::arg("backend"), py::arg("device"), py::arg("global_ranks"))
      .def_static("over_shared_memory", &Level::over_shared_memory, py::arg("memory"), py::arg("rank"), py::arg("processes"),
                  py::arg("gloo"), py::arg("global_ranks"))
      .def_static(
          "over_nccl",
          [milliseconds](const py::bytes& unique_id, int rank, const c10::Device& device, std::vector<int> global_ranks, double timeout) {
            const std::string id = unique_id;
            py::gil_scoped_release no_gil;
            return Level::over_nccl(id, rank, device, std::move(global_ranks), milliseconds(timeout));
          },
          py::arg("unique_id"), py::arg("rank"), py::arg("device"), py::arg("global_ranks"), py::arg("timeout"));
}

}  // namespace dltrain::bindings
