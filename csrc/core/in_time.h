#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

namespace dltrain {

// Returns the result of a call that may block for ever and cannot be cancelled, or nothing if it takes longer than `timeout`. The call then
// goes on in a thread of its own, which passes the result to `late`. Neither `call` nor `late` may throw.
template <class Call, class Late>
auto in_time(std::chrono::milliseconds timeout, Call call, Late late) -> std::optional<decltype(call())> {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<decltype(call())> result;
    bool left_behind = false;
  };
  const auto state = std::make_shared<State>();
  std::thread thread;
  try {
    thread = std::thread([state, call, late] {
      auto result = call();
      std::unique_lock lock(state->mutex);
      if (state->left_behind) return late(std::move(result));
      state->result = std::move(result);
      state->changed.notify_all();
    });
  } catch (const std::system_error&) {
    return call();  // no thread could be started
  }
  std::unique_lock lock(state->mutex);
  state->changed.wait_for(lock, timeout, [&] { return state->result.has_value(); });
  state->left_behind = !state->result.has_value();
  lock.unlock();
  state->left_behind ? thread.detach() : thread.join();
  return std::move(state->result);
}

}  // namespace dltrain
