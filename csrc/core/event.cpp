#include "core/event.h"

#include "core/cuda/runtime.h"

namespace dltrain {

Event Event::record(const Place& place) {
  Event event;
  if constexpr (built_with_cuda) {
    event.device_ = place.device;
    if (place.on_cuda()) event.event_ = cuda::record_event(place);
  }
  return event;
}

void Event::wait(const Place& place) const {
  if constexpr (built_with_cuda) {
    if (event_ && place.on_cuda()) return cuda::wait_event(place, event_.get());
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
