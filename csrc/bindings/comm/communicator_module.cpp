#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/comm/communicator.h"
#include "bindings/module.h"
#include "comm/run/executor.h"

namespace dltrain::bindings {

namespace {

// Makes a Python method of a function of the communicator, the tensor and the options, which are keyword arguments.
template <class Method>
auto with_options(Method method) {
  return [method](Communicator& self, py::object tensor, const std::string& collective, const std::string& algorithm,
                  const std::string& codec, bool average, int root, int segments, std::optional<at::Tensor> residual, bool stochastic,
                  uint64_t seed, std::optional<uint32_t> step, std::shared_ptr<BucketState> bucket, bool feeds,
                  std::optional<at::Tensor> loss_scale, std::optional<at::Tensor> shard, std::vector<int64_t> sizes,
                  std::vector<at::Tensor> minus, std::optional<at::Tensor> message, int64_t agreement) {
    CollectiveOptions options;
    options.call.collective = comm::find_collective(collective);
    options.call.root = root;
    options.sizes = std::move(sizes);
    options.call.algorithm = algorithm;
    options.call.codec = codec;
    options.call.average = average;
    options.call.segments = segments;
    options.call.stochastic = stochastic;
    options.call.seed = seed;
    options.call.step = step;
    options.feedback.residual = std::move(residual);
    if (bucket && feeds) options.feedback = bucket->feedback();
    options.feedback.loss_scale = std::move(loss_scale);
    options.bucket = std::move(bucket);
    options.shard = std::move(shard);
    options.minus = std::move(minus);
    options.message = std::move(message);
    options.call.agreement = agreement;
    return method(self, std::move(tensor), options);
  };
}

template <class Class, class Function>
void def_with_options(Class& communicator, const char* name, Function method) {
  communicator.def(name, with_options(method), py::arg("tensor"), py::kw_only(), py::arg("collective") = "all_reduce",
                   py::arg("algorithm") = "auto", py::arg("codec") = "raw", py::arg("average") = false, py::arg("root") = 0,
                   py::arg("segments") = 0, py::arg("residual") = py::none(), py::arg("stochastic") = false, py::arg("seed") = 0,
                   py::arg("step") = py::none(), py::arg("bucket") = py::none(), py::arg("feeds") = false,
                   py::arg("loss_scale") = py::none(), py::arg("shard") = py::none(), py::arg("sizes") = py::tuple(),
                   py::arg("minus") = py::tuple(), py::arg("message") = py::none(), py::arg("agreement") = 0);
}

}  // namespace

void bind_communicator(py::module_& module) {
  module.def("check_names", [](const std::string& algorithm, const std::string& codec, const std::string& collective) {
    comm::check_names(comm::find_collective(collective), algorithm, codec);
  });
  module.def(
      "timeout_of",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        return std::chrono::duration<double>(group->getDefaultBackend()->getBackendOptions()->timeout).count();
      },
      "The timeout of a group's own collectives, in seconds.");
  py::class_<Ranks>(module, "Ranks")
      .def(py::init<std::string, std::string, std::vector<int>, int>(), py::arg("name"), py::arg("description"), py::arg("ranks"),
           py::arg("rank"))
      .def_readonly("ranks", &Ranks::ranks)
      .def_readonly("rank", &Ranks::rank);
  py::class_<Communicator> communicator(module, "Communicator");
  communicator
      .def(py::init([](std::shared_ptr<Level> across, std::shared_ptr<Level> inside, std::pair<int, int> hosts,
                       const std::optional<c10::intrusive_ptr<c10d::Backend>>& control, Ranks members, const c10::Device& device,
                       double timeout, double answer_timeout, double round_trip, bool measures) {
             using Seconds = comm::AdaptiveTimeout::Seconds;
             const comm::Hosts of_all{hosts.first, hosts.second, static_cast<int>(members.ranks.size())};
             const comm::AdaptiveTimeout answers_within{Seconds(answer_timeout), Seconds(round_trip)};
             auto work = std::make_shared<TensorCollectives>(
                 std::move(across), std::move(inside), of_all, control.value_or(c10::intrusive_ptr<c10d::Backend>()), std::move(members),
                 std::chrono::floor<std::chrono::milliseconds>(Seconds(timeout)), answers_within, measures);
             return std::make_unique<Communicator>(std::move(work), device);
           }),
           py::arg("across"), py::arg("inside"), py::arg("hosts"), py::arg("control"), py::arg("members"), py::arg("device"),
           py::arg("timeout"), py::arg("answer_timeout"), py::arg("round_trip"), py::arg("measures"))
      .def("wait", &Communicator::wait, py::arg("future"), py::arg("timeout") = py::none())
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>())
      .def("drain", &Communicator::drain, py::call_guard<py::gil_scoped_release>())
      .def("culprit", &Communicator::culprit)
      .def_property_readonly("segment_bytes", &Communicator::segment_bytes)
      .def("stats", [](const Communicator& self) {
        py::dict out;
        const auto stats = self.stats();
        out["calls"] = stats.calls;
        out["wire_bytes"] = stats.wire_bytes;
        out["inside_bytes"] = stats.inside_bytes;
        out["seconds"] = stats.seconds;
        out["tensor_bytes"] = stats.tensor_bytes;
        out["bus_bytes"] = stats.bus_bytes;
        return out;
      });
  def_with_options(communicator, "run", [](Communicator& self, const py::object& tensor, const CollectiveOptions& options) {
    self.run(tensor.cast<at::Tensor>(), options);
  });
  def_with_options(communicator, "submit", [](Communicator& self, py::object tensor, const CollectiveOptions& options) {
    return self.submit(std::move(tensor), options);
  });
}

}  // namespace dltrain::bindings
