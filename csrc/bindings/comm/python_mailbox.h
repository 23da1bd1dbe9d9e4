#pragma once

#include <unistd.h>

#include <memory>
#include <utility>

#include "bindings/module.h"
#include "comm/transport/mailbox.h"

namespace dltrain::bindings {

// A mailbox as Python has it: its threads may need the GIL to release a tensor, and stay behind in the parent of a fork().
class PythonMailbox {
 public:
  explicit PythonMailbox(std::unique_ptr<comm::Mailbox> mailbox) : mailbox_(std::move(mailbox)) {}
  ~PythonMailbox() {
    py::gil_scoped_release no_gil;
    getpid() == process_ ? mailbox_.reset() : static_cast<void>(mailbox_.release());
  }
  PythonMailbox(const PythonMailbox&) = delete;
  PythonMailbox& operator=(const PythonMailbox&) = delete;

  comm::Mailbox& get() const {
    TORCH_CHECK_VALUE(mailbox_, "mailbox: expected one that is not in use, got the mailbox of a store");
    return *mailbox_;
  }
  // For a user that is to be its only one.
  std::unique_ptr<comm::Mailbox> take() {
    get();
    return std::move(mailbox_);
  }

 private:
  std::unique_ptr<comm::Mailbox> mailbox_;
  const pid_t process_ = getpid();
};

}  // namespace dltrain::bindings
