#include "kernels/adamw.h"

#include "kernels/cpu/for_each.h"

namespace dltrain {

template <int K>
void adamw(const Place& place, const AdamWTensors<K>& tensors, const math::AdamW& hyper) {
  const auto& steps = tensors.steps;
  std::vector<math::AdamWElement> elements;
  elements.reserve(steps.size());
  for (size_t row = 0; row < steps.size(); ++row) {
    *steps[row] += 1.0f;
    // Neighbours mostly share their step count, and two calls of pow cost as much as a small tensor's update.
    const bool same = row > 0 && *steps[row] == *steps[row - 1];
    elements.push_back(same ? elements.back() : hyper.at(*steps[row]));
  }
  cpu::for_each(place, tensors.list, [&](int64_t row) { return elements[row]; });
}

template void adamw<4>(const Place&, const AdamWTensors<4>&, const math::AdamW&);
template void adamw<5>(const Place&, const AdamWTensors<5>&, const math::AdamW&);

}  // namespace dltrain
