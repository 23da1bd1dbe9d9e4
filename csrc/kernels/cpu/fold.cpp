#include "kernels/fold.h"

#include <algorithm>
#include <array>

namespace dltrain {

namespace {

// Operands are added block by block, so that the running sum stays in the first-level cache however many there are.
constexpr int64_t block = 2048;

void fold_block(float* own, const std::vector<const float*>& received, size_t own_place, int64_t first, int64_t numel,
                const math::Fold& fold) {
  alignas(64) std::array<float, block> sum;
  float* values = own + first;
  const auto start = [&](const auto& value) {
    for (int64_t i = 0; i < numel; ++i) sum[i] = value(i);
  };
  const auto add = [&](const auto& value) {
    for (int64_t i = 0; i < numel; ++i) sum[i] = fold.add(sum[i], value(i));
  };
  const auto mine = [&](int64_t i) { return fold.own(values[i]); };
  for (size_t place = 0; place <= received.size(); ++place) {
    const float* theirs = place == own_place ? nullptr : received[place < own_place ? place : place - 1] + first;
    const auto other = [&](int64_t i) { return theirs[i]; };
    if (place == 0) {
      theirs ? start(other) : start(mine);
    } else {
      theirs ? add(other) : add(mine);
    }
  }
  std::copy_n(sum.data(), numel, values);
}

// The ring's hop, and every other with one partner: the sum of two, in either order the same bits.
void fold_pair(float* own, const float* received, int64_t begin, int64_t end, const math::Fold& fold) {
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) own[i] = fold.add(fold.own(own[i]), received[i]);
}

}  // namespace

void fold(const Place& place, float* own, const std::vector<const float*>& received, int own_place, int64_t numel, const math::Fold& fold) {
  constexpr int64_t grain = 1 << 17;
  place.parallel_for(numel, grain, [&](int64_t begin, int64_t end) {
    if (received.size() == 1) return fold_pair(own, received[0], begin, end, fold);
    for (int64_t first = begin; first < end; first += block) {
      fold_block(own, received, own_place, first, std::min(block, end - first), fold);
    }
  });
}

}  // namespace dltrain
