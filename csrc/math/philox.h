#pragma once

// Philox4x32-10 (Salmon, Moraes, Dror & Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): four random words that are a function
// of a counter and a key, so that the random word of an element does not depend on which thread computes it.

#include <cstdint>

#include "core/host_device.h"

namespace dltrain::math {

struct Words {
  uint32_t word[4];
};

DLT_HD Words philox(Words counter, uint32_t key0, uint32_t key1) {
  auto& [c0, c1, c2, c3] = counter.word;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

// The random numbers of stochastic rounding. Element e of a rank's tensor uses word e % 4 of counter (e / 4, rank), with key (seed, step).
// The upper half of the seed is the last word of the counter.
struct RandomStream {
  uint64_t seed = 0;
  uint32_t step = 0, rank = 0;

  DLT_HD Words at(int64_t quad) const {  // for elements 4 quad to 4 quad + 3
    const auto low = static_cast<uint32_t>(quad), high = static_cast<uint32_t>(quad >> 32);
    return philox({{low, high, rank, static_cast<uint32_t>(seed >> 32)}}, static_cast<uint32_t>(seed), step);
  }
};

}  // namespace dltrain::math
