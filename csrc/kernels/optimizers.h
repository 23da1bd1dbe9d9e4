#pragma once

// All optimizers: what else has to know of one goes over this list.

#include <tuple>

#include "math/optim/adagrad.h"
#include "math/optim/adamw.h"
#include "math/optim/lars.h"
#include "math/optim/sgd.h"

namespace dltrain {

using Optimizers = std::tuple<math::AdamW, math::SGD, math::LARS, math::Adagrad>;

}  // namespace dltrain
