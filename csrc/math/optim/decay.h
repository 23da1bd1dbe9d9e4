#pragma once

#include "core/host_device.h"

namespace dltrain::math {

// A gradient with weight decay added to it. Without decay an infinite parameter has no say: 0 * inf is NaN.
DLT_HD float with_decay(float gradient, float weight_decay, float parameter) {
  return weight_decay == 0.0f ? gradient : gradient + weight_decay * parameter;
}

}  // namespace dltrain::math
