#pragma once

// What the codecs have in common: a block of elements has one scale, and an element is decoded as value(code) * scale.
//
//   statistic   the largest magnitude of the block or, for codecs of one bit, the mean magnitude
//   scale       statistic / largest code           x is approximately value(code(x / scale)) * scale
//
// A block that contains a NaN or an infinity has scale NaN and codes of zero. A block whose statistic is below 2^-117 has scale 0: its
// reciprocal might not be finite, and its scale might not be a normal number. (127 / absmax overflows below 4e-37, or 2^-121.)

#include "core/host_device.h"

namespace dltrain::math {

enum class Statistic { none, absmax, mean };

inline constexpr uint32_t nan_bits = 0x7fc00000;  // the one NaN that is sent
inline constexpr float smallest_statistic = 0x1p-117f, largest_float = 0x1.fffffep127f;

DLT_HD uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffff; }
DLT_HD bool is_finite(float x) { return magnitude_bits(x) < 0x7f800000; }

// Bounds of a codec's error, relative to the largest magnitude of the block: the maximum over the elements, and the root mean square over a
// block. They hold up to fp32 rounding, a factor of 1 + 1e-4. The rms of stochastic rounding is an expectation.
struct Bound {
  double max, rms;
};

struct Scale {
  float decode;  // value(code) * decode is the element
  float encode;  // element * encode is rounded to a code
};

DLT_HD Scale scale_of(float statistic, float largest) {
  if (!is_finite(statistic)) return {float_of(nan_bits), 0.0f};
  if (statistic < smallest_statistic) return {0.0f, 0.0f};
  // The largest float divided by 127 is rounded up, so the product with 127 would be infinite.
  const float scale = (statistic < 0x1.fffffcp127f ? statistic : 0x1.fffffcp127f) / largest;
  return {scale, largest / statistic};
}

// The decoded element. A NaN is returned explicitly, because the bits of a product with NaN differ between processors.
template <class Codec>
DLT_HD float decoded(uint32_t code, float scale) {
  if constexpr (Codec::statistic == Statistic::none) {
    return Codec::value(code);
  } else {
    return is_finite(scale) ? Codec::scaled(code, scale) : float_of(nan_bits);
  }
}

// Gives the decoded elements of a block.
template <class Codec>
struct Decoded {
  float scale;

  DLT_HD float operator()(uint32_t code) const { return decoded<Codec>(code, scale); }
};

// Gives the codes of a block's elements, rounded to nearest. If the statistic is the mean, a code is a sign, and needs no scale.
template <class Codec>
struct Nearest {
  float encode;

  DLT_HD uint32_t operator()(float x, uint32_t) const {
    if constexpr (Codec::statistic == Statistic::mean) return Codec::nearest(x);
    return Codec::nearest(x * encode);
  }
};

// A random word as a number in [0, 1), in steps of 2^-31 near 0.
DLT_HD float uniform(uint32_t random) {
  const float number = static_cast<float>(static_cast<int32_t>(random >> 1)) * 0x1p-31f;
  return number < 1.0f ? number : 0x1.fffffep-1f;
}

// Returns `yes` or `no`. Both are computed, so that the compiler needs no branch.
DLT_HD uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

DLT_HD float clamped(float x, float largest) { return x > largest ? largest : x < -largest ? -largest : x; }

// One of the two integers next to x, with such probabilities that the expectation is x. |x| < 2^23.
DLT_HD int32_t stochastic_integer(float x, uint32_t random) {
  const auto whole = static_cast<int32_t>(x);
  const float rest = x - static_cast<float>(whole);
  const int32_t away = uniform(random) < float_of(magnitude_bits(rest)) ? 1 : 0, negative = static_cast<int32_t>(bits_of(rest)) >> 31;
  return whole + ((away ^ negative) - negative);
}

// The nearest integer, ties to even, plus 0x4b400000; |x| < 2^22. A float near 1.5 * 2^23 has no bits for a fraction.
DLT_HD uint32_t nearest_integer(float x) { return bits_of(x + 0x1.8p23f); }

}  // namespace dltrain::math
