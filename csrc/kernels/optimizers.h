#pragma once

// The list of all optimizers. Everything that is compiled or registered for each optimizer iterates over it.

#include <tuple>

#include "math/optim/adadelta.h"
#include "math/optim/adagrad.h"
#include "math/optim/adam.h"
#include "math/optim/adamax.h"
#include "math/optim/adamw.h"
#include "math/optim/ftrl.h"
#include "math/optim/lamb.h"
#include "math/optim/lars.h"
#include "math/optim/lion.h"
#include "math/optim/nadam.h"
#include "math/optim/radam.h"
#include "math/optim/rmsprop.h"
#include "math/optim/sgd.h"
#include "math/optim/sgld.h"

namespace dltrain {

using Optimizers = std::tuple<math::AdamW, math::SGD, math::LARS, math::Adagrad, math::Adam, math::NAdam, math::RAdam, math::Adamax,
                              math::RMSprop, math::Adadelta, math::Lion, math::LAMB, math::FTRL, math::SGLD>;

}  // namespace dltrain
