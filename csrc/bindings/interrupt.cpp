#include "bindings/interrupt.h"

#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace dltrain::bindings {

namespace py = pybind11;

namespace {

// Python's handler, which ours replaces during a wait; the pipe to which ours writes the number of the wait; and that number.
struct sigaction pythons;
int written = -1;
std::atomic<char> number = 0;

void on_signal(int signal) {
  const int before = errno;
  pythons.sa_handler(signal);
  const char byte = number;
  [[maybe_unused]] const auto wrote = write(written, &byte, 1);  // if the pipe is full, there already is something to read
  errno = before;
}

// One per process: a thread that ends the wait whose number it reads from the signal handler.
class Listener {
 public:
  // A child of fork() does not have the parent's threads, so it gets a new listener.
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
    if (end_) ++number;  // what was written during another wait is no concern of this one
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
    for (char byte;;) {
      const auto count = read(from, &byte, 1);
      if (count < 0 && errno == EINTR) continue;
      if (count != 1) return;
      std::lock_guard lock(mutex_);
      if (end_ && byte == number) std::exchange(end_, nullptr)();
    }
  }

  std::mutex mutex_;  // also held while `end_` runs, so that the objects that it uses are not destroyed meanwhile
  std::function<void()> end_;
};

// Whether the handler is Python's default one, which raises KeyboardInterrupt. _signal is used, because the functions of signal are slower:
// they convert to enumerations.
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
  py::gil_scoped_release no_gil;  // the thread that ends the wait may need the GIL
  Listener::of_this_process().set(nullptr);
}

void Interruptible::check() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace dltrain::bindings
