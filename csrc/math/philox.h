#pragma once

// Philox4x32 (Salmon, Moraes, Dror & Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): four random words that are a function
// of a counter and a key, so that the random word of an element does not depend on which thread computes it. Ten rounds are usual; seven
// are the fewest that pass all tests of that paper.

#include <cstdint>

#include "core/host_device.h"

namespace dltrain::math {

struct Words {
  uint32_t word[4];
};

// The keys of a round, and what all rounds multiply by.
struct PhiloxKeys {
  static constexpr uint32_t factor0 = 0xD2511F53, factor1 = 0xCD9E8D57;
  uint32_t key0, key1;

  DLT_HD void advance() {
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
};

template <int rounds>
DLT_HD Words philox(Words counter, PhiloxKeys keys) {
  auto& [c0, c1, c2, c3] = counter.word;
  for (int round = 0; round < rounds; ++round, keys.advance()) {
    const uint64_t product0 = uint64_t{PhiloxKeys::factor0} * c0, product1 = uint64_t{PhiloxKeys::factor1} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ keys.key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ keys.key1;
    c3 = static_cast<uint32_t>(product0);
  }
  return counter;
}

// The random numbers of stochastic rounding, with key (seed, step) and counter (index, rank). In messages, element e of a rank's tensor
// uses word e % 4 at index e / 4; in parameters, half a word (math/narrowing.h). The upper half of the seed is the last word of the
// counter.
struct RandomStream {
  uint64_t seed = 0;
  uint32_t step = 0, rank = 0;

  DLT_HD PhiloxKeys keys() const { return {static_cast<uint32_t>(seed), step}; }

  template <int rounds = 10>
  DLT_HD Words at(int64_t index) const {
    const auto low = static_cast<uint32_t>(index), high = static_cast<uint32_t>(index >> 32);
    return philox<rounds>({{low, high, rank, static_cast<uint32_t>(seed >> 32)}}, keys());
  }
};

}  // namespace dltrain::math
