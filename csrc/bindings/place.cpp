#include "bindings/place.h"

#include <ATen/Parallel.h>

namespace dltrain::bindings {

Place caller_place(const c10::Device& device) {
  if constexpr (built_with_cuda) {
    if (device.is_cuda()) return cuda_place(device);
  }
  return {[](int64_t n, int64_t grain, const Range& body) { at::parallel_for(0, n, grain, body); }};
}

OnStream::OnStream(const Place& place) {
  if constexpr (built_with_cuda) {
    if (place.on_cuda()) guard_ = cuda_make_current(place);
  }
}

}  // namespace dltrain::bindings
