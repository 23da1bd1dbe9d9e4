#pragma once

#include <cstdint>
#include <initializer_list>

namespace dltrain {

// Differs, as good as always, where the numbers do; of further ones, going on from the digest so far.
inline uint64_t digest(std::initializer_list<int64_t> numbers, uint64_t so_far = 0) {
  for (const int64_t number : numbers) {
    so_far = (so_far ^ static_cast<uint64_t>(number)) * 0xff51afd7ed558ccdu;
    so_far = (so_far ^ so_far >> 32) * 0xc4ceb9fe1a85ec53u;
    so_far ^= so_far >> 32;
  }
  return so_far;
}

}  // namespace dltrain
