#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace dltrain::cuda {

inline constexpr int width = 4;  // elements per access: 16 bytes of fp32, 8 of the half types

// Adjacent elements that are read or written by one access.
template <class T>
struct alignas(width * sizeof(T)) Pack {
  T values[width];
};

// Whether `data` is aligned for such an access.
template <class T>
DLT_HD bool is_aligned(const T* data) {
  return reinterpret_cast<uintptr_t>(data) % sizeof(Pack<T>) == 0;
}

}  // namespace dltrain::cuda
