#pragma once

#include <functional>

namespace dltrain::bindings {

// While there is one in Python's main thread, Ctrl-C ends what that thread waits for: a handler of Python's would run only after it. Where
// users have a handler of their own for it, that is left to run then, since it need not want an end.
class Interruptible {
 public:
  // Under the GIL. end: has the wait fail; called from another thread. Throws what a signal that has come already raises.
  explicit Interruptible(std::function<void()> end);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  // Under the GIL, when the wait is over: throws what the signal raises that has ended it.
  static void check();

 private:
  void leave() const;

  const bool active_;
};

}  // namespace dltrain::bindings
