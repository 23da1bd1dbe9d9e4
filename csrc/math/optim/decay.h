#pragma once

#include "core/host_device.h"

namespace dltrain::math {

// The gradient plus weight decay. Without decay the parameter is not used, because 0 * inf would be NaN.
DLT_HD float with_decay(float gradient, float weight_decay, float parameter) {
  return weight_decay == 0.0f ? gradient : gradient + weight_decay * parameter;
}

}  // namespace dltrain::math
