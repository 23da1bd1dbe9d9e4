#include "comm/program/simulate.h"

#include "bindings/module.h"
#include "comm/program/selection.h"
#include "comm/run/two_levels.h"

namespace dltrain::bindings {

void bind_simulate(py::module_& module) {
  py::class_<comm::Estimate>(module, "Estimate")
      .def_readonly("seconds", &comm::Estimate::seconds)
      .def_readonly("wire_bytes", &comm::Estimate::wire_bytes)
      .def_readonly("rounds", &comm::Estimate::rounds)
      .def_readonly("segments", &comm::Estimate::segments)
      .def_readonly("algorithm", &comm::Estimate::algorithm);
  module.def("two_level_pieces", &comm::pieces_of);
  module.def("segments_of", &comm::segments_of, py::arg("wire_bytes"), py::arg("segment_bytes"));
  module.def(
      "simulate",
      [](const std::string& collective, const std::string& algorithm, int world_size, int64_t numel, const std::string& codec, int segments,
         double latency, double bandwidth, int ranks_per_host, double inside_latency, double inside_bandwidth, double burst,
         double overhead, double copy, int cores, double encode, double decode, const std::vector<double>& late) {
        const comm::Network network{latency, bandwidth, ranks_per_host, inside_latency, inside_bandwidth, burst, overhead, copy, cores};
        return comm::simulate(comm::find_collective(collective), algorithm, world_size, numel, find_codec(codec), segments, network,
                              {encode, decode}, late);
      },
      py::arg("collective"), py::arg("algorithm"), py::arg("world_size"), py::arg("numel"), py::kw_only(), py::arg("codec"),
      py::arg("segments"), py::arg("latency"), py::arg("bandwidth"), py::arg("ranks_per_host"), py::arg("inside_latency"),
      py::arg("inside_bandwidth"), py::arg("burst"), py::arg("overhead"), py::arg("copy"), py::arg("cores"), py::arg("encode"),
      py::arg("decode"), py::arg("late"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "simulate_servers",
      [](int world_size, int servers, int64_t numel, const std::string& codec, int segments, double latency, double bandwidth,
         int ranks_per_host, double inside_latency, double inside_bandwidth, double burst, double overhead, double copy, int cores,
         double encode, double decode) {
        const comm::Network network{latency, bandwidth, ranks_per_host, inside_latency, inside_bandwidth, burst, overhead, copy, cores};
        return comm::simulate_servers(world_size, servers, numel, find_codec(codec), segments, network, {encode, decode});
      },
      py::arg("world_size"), py::arg("servers"), py::arg("numel"), py::kw_only(), py::arg("codec"), py::arg("segments"), py::arg("latency"),
      py::arg("bandwidth"), py::arg("ranks_per_host"), py::arg("inside_latency"), py::arg("inside_bandwidth"), py::arg("burst"),
      py::arg("overhead"), py::arg("copy"), py::arg("cores"), py::arg("encode"), py::arg("decode"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace dltrain::bindings
