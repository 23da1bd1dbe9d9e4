#include "core/event.h"

#include "core/cuda/runtime.h"

namespace dltrain {

Event Event::record(const ExecutionContext& context) {
  Event event;
  if constexpr (built_with_cuda) {
    event.device_ = context.device;
    if (context.on_cuda()) event.event_ = cuda::record_event(context);
  }
  return event;
}

void Event::wait(const ExecutionContext& context) const {
  if constexpr (built_with_cuda) {
    if (event_ && context.on_cuda()) return cuda::wait_event(context, event_.get());
  }
  synchronize();
}

void Event::synchronize() const {
  if constexpr (built_with_cuda) {
    if (event_) cuda::synchronize_event(device_, event_.get());
  }
}

bool Event::passed() const {
  if constexpr (built_with_cuda) return !event_ || cuda::event_passed(device_, event_.get());
  return true;
}

}  // namespace dltrain
