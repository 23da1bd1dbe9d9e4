#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <ATen/ops/from_blob.h>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/comm/gloo/mailbox.h"
#include "bindings/comm/python_mailbox.h"
#include "bindings/interrupt.h"
#include "bindings/module.h"
#include "comm/transport/in_process_mailbox.h"

namespace dltrain::bindings {

namespace {

struct SessionEnd {
  bool in_good_order;
  std::string reason;
};

py::object as_python(comm::Mailbox::Event event) {
  using Kind = comm::Mailbox::Event::Kind;
  if (event.kind != Kind::message) return py::cast(SessionEnd{event.kind == Kind::closed, std::move(event.reason)});
  return py::cast(at::from_blob(event.data.get(), {event.bytes}, [data = event.data](void*) {}, at::kByte));
}

bool send(const PythonMailbox& mailbox, int peer, std::vector<at::Tensor> tensors, bool copy) {
  using Result = comm::Mailbox::SendResult;
  std::vector<comm::Mailbox::Bytes> pieces;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous(), "tensors: expected contiguous tensors on the CPU");
    pieces.push_back({tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes())});
  }
  py::gil_scoped_release no_gil;
  const auto keep = std::make_shared<std::vector<at::Tensor>>(std::move(tensors));
  const Result result = mailbox.get().send(peer, {}, pieces, copy ? nullptr : keep);
  if (result == Result::closed) {
    C10_THROW_ERROR(DistBackendError,
                    mailbox.get().is_closed() ? "the mailbox is closed" : c10::str("the session with rank ", peer, " has ended"));
  }
  return result == Result::taken;
}

py::object receive(const PythonMailbox& mailbox, std::optional<double> timeout) {
  const Deadline deadline =
      timeout ? Clock::now() + std::chrono::ceil<Clock::duration>(std::chrono::duration<double>(*timeout)) : Deadline::max();
  std::optional<comm::Mailbox::Event> event;
  {
    const Interruptible interruptible([&] { mailbox.get().close(std::chrono::milliseconds(0)); });
    py::gil_scoped_release no_gil;
    event = mailbox.get().receive(deadline);
  }
  Interruptible::check();
  if (event) return py::make_tuple(event->from, as_python(std::move(*event)));
  if (mailbox.get().is_closed()) C10_THROW_ERROR(DistBackendError, "the mailbox is closed");
  return py::none();
}

}  // namespace

void bind_mailbox(py::module_& module) {
  py::class_<SessionEnd>(module, "SessionEnd")
      .def_readonly("in_good_order", &SessionEnd::in_good_order)
      .def_readonly("reason", &SessionEnd::reason);
  py::class_<PythonMailbox>(module, "Mailbox")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> backend, int64_t limit) {
             return std::make_unique<PythonMailbox>(std::make_unique<GlooMailbox>(std::move(backend), limit));
           }),
           py::arg("backend"), py::kw_only(), py::arg("limit") = GlooMailbox::default_limit)
      .def_property_readonly("rank", [](const PythonMailbox& self) { return self.get().rank(); })
      .def_property_readonly("world_size", [](const PythonMailbox& self) { return self.get().world_size(); })
      .def("send", &send, py::arg("peer"), py::arg("tensors"), py::kw_only(), py::arg("copy") = true)
      .def("receive", &receive, py::arg("timeout") = py::none())
      .def(
          "close",
          [](PythonMailbox& self, double grace) {
            py::gil_scoped_release no_gil;
            self.get().close(std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(grace)));
          },
          py::arg("grace") = 1.0);
  module.def(
      "in_process_mailboxes",
      [](int world_size) {
        std::vector<std::unique_ptr<PythonMailbox>> all;
        for (auto& mailbox : comm::in_process_mailboxes(world_size)) all.push_back(std::make_unique<PythonMailbox>(std::move(mailbox)));
        return all;
      },
      py::arg("world_size"));
}

}  // namespace dltrain::bindings
