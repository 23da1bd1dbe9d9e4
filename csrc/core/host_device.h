#pragma once

#include <cstdint>

// DLT_HD marks arithmetic that the host and the device compile from the same source, the host once for each instruction set. It forces
// inlining, so that there is no copy of such a function that the linker could share between instruction sets. DLT_HD_LAMBDA is the same for
// a lambda, and is written after its parameters.
#if defined(__CUDACC__)
#define DLT_HD __host__ __device__ __forceinline__
#define DLT_HD_LAMBDA
#else
#define DLT_HD inline __attribute__((always_inline))
#define DLT_HD_LAMBDA __attribute__((always_inline))
#endif

namespace dltrain {

DLT_HD uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
DLT_HD float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

}  // namespace dltrain
