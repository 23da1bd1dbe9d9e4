#pragma once

#include <functional>

namespace dltrain::bindings {

// While an object of this class exists in Python's main thread, Ctrl-C ends the wait of that thread; Python's own handler would only run
// after the wait. It does nothing if the user has installed a handler of SIGINT, since that handler may not want to end the wait.
class Interruptible {
 public:
  // Needs the GIL. end: makes the wait fail; called from another thread. Throws the exception of a signal that has already arrived.
  explicit Interruptible(std::function<void()> end);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  // Needs the GIL; to be called after the wait. Throws the exception of the signal that has ended it.
  static void check();

 private:
  void leave() const;

  const bool active_;
};

}  // namespace dltrain::bindings
