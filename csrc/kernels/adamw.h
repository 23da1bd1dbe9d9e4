#pragma once

#include <vector>

#include "core/place.h"
#include "core/tensor_list.h"
#include "math/adamw.h"

namespace dltrain {

// The tensors of one fused step. Streams: parameter, gradient, exp_avg, exp_avg_sq and, for AMSGrad, max_exp_avg_sq. Gradients are only
// read.
template <int K>
struct AdamWTensors {
  TensorList<K> list;
  std::vector<float*> steps;  // one step counter per row
};

// Advances every row's step counter by one and updates its tensors, all in one pass over memory.
template <int K>
void adamw(const Place& place, const AdamWTensors<K>& tensors, const math::AdamW& hyper);

}  // namespace dltrain
