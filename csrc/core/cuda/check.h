#pragma once

#include <cuda_runtime.h>

#include <stdexcept>

#include "core/check.h"

namespace dltrain::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // resets the error, so that later calls of this function do not return it
  throw std::runtime_error(text("CUDA: ", what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

}  // namespace dltrain::cuda
