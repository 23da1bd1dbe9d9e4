#pragma once

// Two ways to keep in a bfloat16 what a step does to a parameter, beside rounding to nearest.

#include <cstdint>

#include "core/dtype.h"
#include "core/host_device.h"
#include "math/philox.h"

namespace dltrain::math {

// Stochastic rounding: one of the two bfloat16 next to x, with such probabilities that the expectation is x (Zamirai et al., "Revisiting
// BFloat16 Training", 2021). random: 16 bits.
DLT_HD BFloat16 stochastic_bfloat16(float x, uint32_t random) {
  const uint32_t bits = bits_of(x), finite = (bits + random) >> 16, quiet = (bits >> 16) | 0x0040;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : finite)};
}

// The parameters' random numbers are those of a rank that does not exist, so that no message is rounded with the same ones.
inline constexpr uint32_t of_parameters = 0x80000000;

// Four words of a RandomStream round eight elements: word e % 4 at index e / 8 rounds element e by its lower half if e % 8 < 4, otherwise
// by its upper half.
inline constexpr int rounds_of_parameters = 7;
DLT_HD Words words_for(const RandomStream& random, int64_t element) { return random.at<rounds_of_parameters>(element / 8); }
DLT_HD uint32_t half_for(int64_t element, uint32_t word) { return word >> (element & 4 ? 16 : 0) & 0xffff; }

// A bfloat16 that is extended by eight bits: a float whose last eight bits are zero, as the nearest bfloat16 and the eight bits after its
// 16. Ties of the bfloat16 are away from zero, so that the eight bits alone tell whether it was rounded up.
struct Extended {
  BFloat16 element;
  uint8_t rest;
};

// The first 24 bits of a number, rounded to nearest even.
DLT_HD uint32_t kept_bits(float x) { return (bits_of(x) + (0x7f + ((bits_of(x) >> 8) & 1))) >> 8; }

DLT_HD Extended extended(float x) {
  const uint32_t bits = bits_of(x), kept = kept_bits(x);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {{static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x0040 : (kept + 0x80) >> 8)}, static_cast<uint8_t>(is_nan ? 0 : kept)};
}

// The element may have been written by others, so that the eight bits are of another one. Then they change at most its last place.
DLT_HD float widen(const Extended& x) {
  const uint32_t bits = static_cast<uint32_t>(x.element.bits) << 16, magnitude = bits & 0x7fffffff;
  const auto rest = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(x.rest)) * 256);
  const bool is_exact = magnitude >= 0x7f800000 || (magnitude == 0 && static_cast<int32_t>(rest) < 0);
  return float_of(is_exact ? bits : bits + rest);
}

// The float next to x whose nearest bfloat16 is the element; x itself if that is another bfloat16's.
DLT_HD float extending(float element, float x) {
  const uint32_t whole = bits_of(element) >> 8;
  const auto rest = static_cast<int32_t>(kept_bits(x) - whole);
  return rest > 128 || rest < -128 ? x : float_of((whole + static_cast<uint32_t>(rest < 128 ? rest : 127)) << 8);
}

}  // namespace dltrain::math
