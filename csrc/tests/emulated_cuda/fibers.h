#pragma once

#include <ucontext.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace emulated_cuda {

// The state with which a fiber continues after a switch, for the processor and for the sanitizers.
struct Context {
  ucontext_t registers;
  const void* stack = nullptr;  // lowest byte
  size_t stack_bytes = 0;
  void* fiber = nullptr;  // for the thread sanitizer

  // Returns when another context switches back. What precedes a switch `in_order` happens before what follows it.
  void switch_to(Context& next, [[maybe_unused]] bool in_order) {
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(next.fiber, in_order ? 0 : __tsan_switch_to_fiber_no_sync);
#endif
#ifdef __SANITIZE_ADDRESS__
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, next.stack, next.stack_bytes);
    swapcontext(&registers, &next.registers);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
    swapcontext(&registers, &next.registers);
#endif
  }
};

// Runs a function many times concurrently, like threads, on one thread: a fiber runs until it waits. Only barriers order the fibers.
class Fibers {
 public:
  // Must always be called by the same thread.
  void run(unsigned count, const std::function<void()>& function) {
    function_ = &function;
    running_ = this;
#ifdef __SANITIZE_THREAD__
    caller_.fiber = __tsan_get_current_fiber();
#endif
    while (fibers_.size() < count) fibers_.emplace_back();
    for (unsigned i = 0; i < count; ++i) fibers_[i].state = State::ready;
    for (unsigned left = count; left > 0;) {
      for (unsigned i = 0; i < count; ++i) {
        Fiber& fiber = fibers_[i];
        if (fiber.state == State::done) continue;
        index_.store(i, std::memory_order_relaxed);
        caller_.switch_to(fiber.context, fiber.state == State::ready);
        if (fiber.state == State::done) --left;
      }
    }
  }

  // Index of the calling fiber.
  static unsigned index() { return index_.load(std::memory_order_relaxed); }
  static void wait() { running_->leave(State::waits); }

 private:
  enum class State { ready, waits, done };
  struct Fiber {
    static constexpr size_t stack_bytes = 256 << 10;

    Context context;
    std::unique_ptr<char[]> stack{new char[stack_bytes]};
    std::atomic<State> state = State::done;

    Fiber() {
      getcontext(&context.registers);
      context.registers.uc_stack.ss_sp = stack.get();
      context.registers.uc_stack.ss_size = stack_bytes;
      makecontext(&context.registers, [] { running_->live(); }, 0);
      context.registers.uc_stack = {};  // otherwise the address sanitizer would forget at each switch what is on the stack
      context.stack = stack.get();
      context.stack_bytes = stack_bytes;
#ifdef __SANITIZE_THREAD__
      context.fiber = __tsan_create_fiber(0);
#endif
    }
#ifdef __SANITIZE_THREAD__
    ~Fiber() { __tsan_destroy_fiber(context.fiber); }
#endif
  };

  void live() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &caller_.stack, &caller_.stack_bytes);
#endif
    while (true) {
      (*function_)();
      leave(State::done);
    }
  }

  void leave(State state) {
    Fiber& fiber = fibers_[index()];
    fiber.state.store(state, std::memory_order_relaxed);
    fiber.context.switch_to(caller_, state == State::done);
  }

  inline static Fibers* running_ = nullptr;
  inline static std::atomic<unsigned> index_ = 0;
  const std::function<void()>* function_ = nullptr;
  Context caller_;
  std::deque<Fiber> fibers_;  // reused by the next call
};

// A barrier for fibers, like std::barrier for threads.
class Barrier {
 public:
  explicit Barrier(unsigned fibers) : expected_(fibers) {}

  void arrive_and_wait() {
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    arrived_.fetch_add(1, std::memory_order_acq_rel);
    while (phase_.load(std::memory_order_acquire) == phase) {
      if (arrived_.load(std::memory_order_acquire) == expected_.load(std::memory_order_acquire)) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
      } else {
        Fibers::wait();
      }
    }
  }

  // The others no longer wait for the calling fiber.
  void drop() { expected_.fetch_sub(1, std::memory_order_acq_rel); }

 private:
  std::atomic<unsigned> expected_, arrived_ = 0, phase_ = 0;
};

}  // namespace emulated_cuda
