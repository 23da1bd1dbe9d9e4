#pragma once

#include <cstdint>
#include <vector>

#include "core/place.h"
#include "math/fold.h"

namespace dltrain {

// own[i] = the sum, in order, of received[0..own_place)[i], fold.own(own[i]), received[own_place..)[i].
void fold(const Place& place, float* own, const std::vector<const float*>& received, int own_place, int64_t numel, const math::Fold& fold);

}  // namespace dltrain
