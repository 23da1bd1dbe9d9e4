#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <ATen/ops/from_blob.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/comm/gloo/mailbox.h"
#include "bindings/interrupt.h"
#include "bindings/module.h"

namespace dltrain::bindings {

namespace {

struct SessionEnd {
  bool in_good_order;
  std::string reason;
};

// A mailbox as Python has it: its threads may need the GIL to release a tensor, and stay behind in the parent of a fork().
class PythonMailbox {
 public:
  PythonMailbox(c10::intrusive_ptr<c10d::Backend> backend, int64_t limit)
      : mailbox_(std::make_unique<GlooMailbox>(std::move(backend), limit)) {}
  ~PythonMailbox() {
    py::gil_scoped_release no_gil;
    getpid() == process_ ? mailbox_.reset() : static_cast<void>(mailbox_.release());
  }
  PythonMailbox(const PythonMailbox&) = delete;
  PythonMailbox& operator=(const PythonMailbox&) = delete;

  GlooMailbox& get() const { return *mailbox_; }

  bool send(int peer, std::vector<at::Tensor> tensors, bool copy) {
    using Result = comm::Mailbox::SendResult;
    std::vector<comm::Mailbox::Bytes> pieces;
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous(), "tensors: expected contiguous tensors on the CPU");
      pieces.push_back({tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes())});
    }
    py::gil_scoped_release no_gil;
    const auto keep = std::make_shared<std::vector<at::Tensor>>(std::move(tensors));
    const Result result = get().send(peer, {}, pieces, copy ? nullptr : keep);
    if (result == Result::closed) {
      C10_THROW_ERROR(DistBackendError,
                      get().is_closed() ? "the mailbox is closed" : c10::str("the session with rank ", peer, " has ended"));
    }
    return result == Result::taken;
  }

  py::object receive(std::optional<double> timeout) {
    const Deadline deadline =
        timeout ? Clock::now() + std::chrono::ceil<Clock::duration>(std::chrono::duration<double>(*timeout)) : Deadline::max();
    std::optional<comm::Mailbox::Event> event;
    {
      const Interruptible interruptible([this] { get().close(std::chrono::milliseconds(0)); });
      py::gil_scoped_release no_gil;
      event = get().receive(deadline);
    }
    Interruptible::check();
    if (event) return py::make_tuple(event->from, as_python(std::move(*event)));
    if (get().is_closed()) C10_THROW_ERROR(DistBackendError, "the mailbox is closed");
    return py::none();
  }

 private:
  static py::object as_python(comm::Mailbox::Event event) {
    using Kind = comm::Mailbox::Event::Kind;
    if (event.kind != Kind::message) return py::cast(SessionEnd{event.kind == Kind::closed, std::move(event.reason)});
    return py::cast(at::from_blob(event.data.get(), {event.bytes}, [data = event.data](void*) {}, at::kByte));
  }

  std::unique_ptr<GlooMailbox> mailbox_;
  const pid_t process_ = getpid();
};

}  // namespace

void bind_mailbox(py::module_& module) {
  py::class_<SessionEnd>(module, "SessionEnd")
      .def_readonly("in_good_order", &SessionEnd::in_good_order)
      .def_readonly("reason", &SessionEnd::reason);
  py::class_<PythonMailbox>(module, "Mailbox")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int64_t>(), py::arg("backend"), py::kw_only(),
           py::arg("limit") = GlooMailbox::default_limit)
      .def_property_readonly("rank", [](const PythonMailbox& self) { return self.get().rank(); })
      .def_property_readonly("world_size", [](const PythonMailbox& self) { return self.get().world_size(); })
      .def("send", &PythonMailbox::send, py::arg("peer"), py::arg("tensors"), py::kw_only(), py::arg("copy") = true)
      .def("receive", &PythonMailbox::receive, py::arg("timeout") = py::none())
      .def(
          "close",
          [](PythonMailbox& self, double grace) {
            py::gil_scoped_release no_gil;
            self.get().close(std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(grace)));
          },
          py::arg("grace") = 1.0);
}

}  // namespace dltrain::bindings
