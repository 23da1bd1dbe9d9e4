#pragma once

#include <cstdint>
#include <initializer_list>

namespace dltrain {

// A hash of the numbers: different numbers almost always have different digests. so_far: the digest of the numbers before these.
inline uint64_t digest(std::initializer_list<int64_t> numbers, uint64_t so_far = 0) {
  for (const int64_t number : numbers) {
    so_far = (so_far ^ static_cast<uint64_t>(number)) * 0xff51afd7ed558ccdu;
    so_far = (so_far ^ so_far >> 32) * 0xc4ceb9fe1a85ec53u;
    so_far ^= so_far >> 32;
  }
  return so_far;
}

}  // namespace dltrain
