#pragma once

// A normally distributed number from two random words (Box & Muller, "A Note on the Generation of Random Normal Deviates", 1958):
//
//   z = sqrt(-2 ln u) cos(2 pi v)           u in (0, 1], v in [0, 1)
//
// Logarithm and cosine are polynomials in fp32, whose bits are the same on every processor; those of the libraries are not. Their errors
// are a few units in the last place. The largest |z| is 5.8, that of u = 2^-24.

#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "core/host_device.h"

namespace dltrain::math {

// ln u = e ln 2 + 2 artanh((m - 1) / (m + 1)) for u = 2^e m, m in [sqrt(1/2), sqrt(2))
DLT_HD float log_of(float u) {
  const uint32_t bits = bits_of(u), shifted = bits - 0x3f3504f3u;  // sqrt(1/2)
  const auto exponent = static_cast<int32_t>(shifted) >> 23;
  const float m = float_of(bits - (static_cast<uint32_t>(exponent) << 23)), s = (m - 1.0f) / (m + 1.0f), s2 = s * s;
  const float series = s * (2.0f + s2 * (0.66666669f + s2 * (0.4f + s2 * (0.28571430f + s2 * 0.22222222f))));
  return static_cast<float>(exponent) * 0.69314718f + series;
}

// cos(2 pi v) = sin(2 pi (1/4 - a)) for a = |v - 1/2| with the sign turned, by Taylor's series up to the 13th power
DLT_HD float cos_of_turn(float v) {
  const float y = 6.2831853f * (fabsf(v - 0.5f) - 0.25f), y2 = y * y;
  return y *
         (1.0f + y2 * (-0.16666667f +
                       y2 * (8.3333333e-3f + y2 * (-1.9841270e-4f + y2 * (2.7557319e-6f + y2 * (-2.5052108e-8f + y2 * 1.6059044e-10f))))));
}

DLT_HD float normal(uint32_t word0, uint32_t word1) {
  const float u = static_cast<float>(static_cast<int32_t>((word0 >> 8) + 1u)) * 0x1p-24f;
  const float v = static_cast<float>(static_cast<int32_t>(word1 >> 8)) * 0x1p-24f;
  return sqrtf(-2.0f * log_of(u)) * cos_of_turn(v);
}

}  // namespace dltrain::math
