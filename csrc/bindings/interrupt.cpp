#include "bindings/interrupt.h"

#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace dltrain::bindings {

namespace py = pybind11;

namespace {

// Python's own handler, in whose place ours is during a wait, and where ours writes.
struct sigaction pythons;
int written = -1;

void on_signal(int signal) {
  const int before = errno;
  pythons.sa_handler(signal);
  const char byte = 0;
  [[maybe_unused]] const auto wrote = write(written, &byte, 1);  // where the pipe is full there is enough to read
  errno = before;
}

// Of a process: a thread that ends the wait when it has read of a signal.
class Listener {
 public:
  // Threads do not come along into a child of fork().
  static Listener& of_this_process() {
    static Listener* listener = nullptr;
    static pid_t process = 0;
    if (process != getpid()) {
      listener = new Listener;
      process = getpid();
    }
    return *listener;
  }

  void set(std::function<void()> end) {
    std::lock_guard lock(mutex_);
    end_ = std::move(end);
  }

 private:
  Listener() {
    int pipe[2];
    if (pipe2(pipe, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe2");
    fcntl(pipe[1], F_SETFL, O_NONBLOCK);  // a handler must not block
    written = pipe[1];
    std::thread([this, from = pipe[0]] { listen(from); }).detach();
  }

  void listen(int from) {
    for (char byte; read(from, &byte, 1) == 1 || errno == EINTR;) {
      std::lock_guard lock(mutex_);
      if (end_) std::exchange(end_, nullptr)();
    }
  }

  std::mutex mutex_;  // also while a wait is being ended, so that nothing of it goes meanwhile
  std::function<void()> end_;
};

// Which raises KeyboardInterrupt. Of the module beneath signal, whose functions look for enumerations first.
bool is_default_handler() {
  static const py::handle get = py::object(py::module_::import("_signal").attr("getsignal")).release();
  static const py::handle raises = py::object(py::module_::import("_signal").attr("default_int_handler")).release();
  return get(SIGINT).is(raises);
}

}  // namespace

Interruptible::Interruptible(std::function<void()> end) : active_(syscall(SYS_gettid) == getpid() && is_default_handler()) {
  if (!active_) return;
  Listener::of_this_process().set(std::move(end));
  struct sigaction ours = {};
  sigaction(SIGINT, nullptr, &pythons);
  ours.sa_handler = on_signal;
  ours.sa_mask = pythons.sa_mask;
  ours.sa_flags = pythons.sa_flags;
  sigaction(SIGINT, &ours, nullptr);
  if (PyErr_CheckSignals() == 0) return;
  leave();
  throw py::error_already_set();
}

Interruptible::~Interruptible() {
  if (active_) leave();
}

void Interruptible::leave() const {
  sigaction(SIGINT, &pythons, nullptr);
  py::gil_scoped_release no_gil;  // which those need who are ending the wait
  Listener::of_this_process().set(nullptr);
}

void Interruptible::check() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace dltrain::bindings
