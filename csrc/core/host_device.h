#pragma once

// DLT_HD marks arithmetic that the host and the device compile from the same lines.
#if defined(__CUDACC__)
#define DLT_HD __host__ __device__ __forceinline__
#else
#define DLT_HD inline
#endif
