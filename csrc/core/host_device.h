#pragma once

// DLT_HD marks arithmetic that the host and the device compile from the same lines, the host once for each instruction set. Forced inline:
// a copy of such a function that the linker could share between instruction sets must not come to be.
#if defined(__CUDACC__)
#define DLT_HD __host__ __device__ __forceinline__
#else
#define DLT_HD inline __attribute__((always_inline))
#endif
