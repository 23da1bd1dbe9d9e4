#include "bindings/module.h"
#include "comm/plan/plan.h"
#include "comm/plan/verify.h"
#include "core/check.h"

namespace dltrain::bindings {

namespace {

constexpr comm::Op ops[] = {comm::Op::send_partial, comm::Op::recv_reduce, comm::Op::finalize, comm::Op::send_final, comm::Op::recv_final};

// Returns the text of a str. For std::string pybind11 also accepts bytes, which need not be text.
std::string text_of(const py::object& given, const char* name) {
  if (PyUnicode_Check(given.ptr())) {
    Py_ssize_t size = 0;
    if (const char* const found = PyUnicode_AsUTF8AndSize(given.ptr(), &size)) return {found, static_cast<size_t>(size)};
    PyErr_Clear();  // a surrogate
  }
  throw py::type_error(text(name, ": expected a str of text, got ", py::repr(given).cast<std::string>()));
}

comm::Op op_of(const std::string& name) {
  std::vector<std::string> names;
  for (comm::Op op : ops) {
    names.push_back(comm::name(op));
    if (name == names.back()) return op;
  }
  unknown_name("op", names, name);
}

}  // namespace

void bind_plans(py::module_& module) {
  py::class_<comm::Step>(module, "Step", "One message or one local operation of a plan.")
      .def(py::init([](const py::object& op, int peer, std::pair<int, int> chunks) {
             return comm::Step{op_of(text_of(op, "op")), peer, {chunks.first, chunks.second}};
           }),
           py::arg("op"), py::arg("peer"), py::arg("chunks"))
      .def_property_readonly("op", [](const comm::Step& step) { return comm::name(step.op); })
      .def_readonly("peer", &comm::Step::peer)
      .def_property_readonly("chunks", [](const comm::Step& step) { return std::pair(step.chunks.begin, step.chunks.end); })
      .def("__eq__", [](const comm::Step& a, const comm::Step& b) { return a == b; })
      .def("__repr__", [](const comm::Step& step) {
        return text("Step('", comm::name(step.op), "', peer=", step.peer, ", chunks=(", step.chunks.begin, ", ", step.chunks.end, "))");
      });

  py::class_<comm::Plan>(module, "Plan", "What one rank does in a collective: rounds of steps over abstract chunks. print() draws it.")
      .def(py::init([](const py::object& algorithm, int rank, int world_size, int chunks, std::vector<comm::Round> rounds, bool exact,
                       const py::object& collective, int root) {
             check(chunks >= 1, "chunks: expected at least 1, got ", chunks);
             check(world_size >= 1, "world_size: expected at least 1, got ", world_size);
             check(rank >= 0 && rank < world_size, "rank: expected 0 to ", world_size - 1, ", got ", rank);
             check(root >= 0 && root < world_size, "root: expected 0 to ", world_size - 1, ", got ", root);
             const comm::Collective which = comm::find_collective(text_of(collective, "collective"));
             return comm::Plan{which, text_of(algorithm, "algorithm"), rank, world_size, chunks, root, std::move(rounds), exact};
           }),
           py::arg("algorithm"), py::arg("rank"), py::arg("world_size"), py::arg("chunks"), py::arg("rounds"), py::arg("exact") = false,
           py::arg("collective") = "all_reduce", py::arg("root") = 0)
      .def_property_readonly("collective", [](const comm::Plan& plan) { return comm::name(plan.collective); })
      .def_readonly("root", &comm::Plan::root)
      .def_readonly("algorithm", &comm::Plan::algorithm)
      .def_readonly("rank", &comm::Plan::rank)
      .def_readonly("world_size", &comm::Plan::world_size)
      .def_readonly("chunks", &comm::Plan::chunks)
      .def_readonly("rounds", &comm::Plan::rounds)
      .def_readonly("exact", &comm::Plan::exact)
      .def("to_json", &comm::to_json, "The plan as JSON text.")
      .def("__eq__", [](const comm::Plan& a, const comm::Plan& b) { return a == b; })
      .def("__str__", &comm::draw)
      .def("__repr__", [](const comm::Plan& plan) {
        return text("<Plan ", comm::name(plan.collective), " by ", plan.algorithm, ": rank ", plan.rank, " of ", plan.world_size, ", ",
                    plan.rounds.size(), " rounds>");
      });

  module.def("collectives", [] {
    std::vector<std::string> names;
    for (const comm::Collective collective : comm::collectives) names.push_back(comm::name(collective));
    return names;
  });
  module.def("algorithms", [](const std::string& collective) { return comm::algorithms(comm::find_collective(collective)); });
  module.def("make_plan", [](const std::string& collective, const std::string& algorithm, int rank, int world_size, int root) {
    return comm::make_plan(comm::find_collective(collective), algorithm, rank, world_size, root);
  });
  module.def("verify", &comm::verify, py::call_guard<py::gil_scoped_release>());
}

}  // namespace dltrain::bindings
