#pragma once

#include <cuda_runtime.h>

#include <stdexcept>

#include "core/check.h"

namespace dltrain::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next to ask for it would take it for its own
  throw std::runtime_error(text("CUDA: ", what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

}  // namespace dltrain::cuda
