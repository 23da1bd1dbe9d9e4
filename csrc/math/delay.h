#pragma once

// Delay compensation (Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017, Eq. 10): a gradient g that a
// worker has computed at w_bak is moved to the present parameter w by the first term of its Taylor series, with the diagonal of the outer
// product of gradients in place of the Hessian:
//
//   g <- g + lambda g^2 (w - w_bak)

#include "core/host_device.h"

namespace dltrain::math {

DLT_HD float compensated(float g, float w, float w_bak, float lambda) { return g + lambda * (g * g) * (w - w_bak); }

}  // namespace dltrain::math
