#pragma once

#include <cstdint>

#include "core/cache_line.h"
#include "core/host_device.h"

namespace dltrain::cpu {

// The caches, in the numbers of __builtin_prefetch.
inline constexpr int first_level = 3, second_level = 2;

// Prefetches into a cache what a loop that has come to these `count` elements will need soon: memory would otherwise be idle while it
// computes. Only a hint, so it may be beyond the end.
template <int count, int level, class T>
DLT_HD void fetch_ahead(const T* elements) {
  constexpr int distance = 2048;
  const auto* const ahead = reinterpret_cast<const char*>(elements) + distance;
  for (int at = 0; at < count * static_cast<int>(sizeof(T)); at += cache_line) __builtin_prefetch(ahead + at, 0, level);
}

}  // namespace dltrain::cpu
