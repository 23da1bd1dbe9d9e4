#pragma once

// The element types of the tensors. All arithmetic is in fp32: elements are widened when they are read, and rounded to nearest even, as in
// IEEE 754, when they are written. The conversions give the same bits on all processors. They use integer arithmetic, because GCC 12 does
// not vectorize its own conversions to half types.

#include <cstdint>

#include "core/host_device.h"

namespace dltrain {

enum class Dtype : uint8_t { fp32, fp16, bf16 };

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

DLT_HD float widen(float x) { return x; }

DLT_HD float widen(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

DLT_HD float widen(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  const uint32_t normal = (magnitude << 13) + ((127 - 15) << 23);
  const uint32_t denormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t special = (magnitude << 13) | 0x7f800000;
  return float_of(sign | (magnitude < 0x0400 ? denormal : magnitude < 0x7c00 ? normal : special));
}

// The bits of the nearest half, for a magnitude that rounds to less than 2^16.
DLT_HD uint32_t nearest_half(uint32_t magnitude) {
  const uint32_t normal = (magnitude + ((magnitude >> 13) & 1) + (0x0fffu - ((127u - 15u) << 23))) >> 13;
  // Below 2^-14 the unit in the last place is 2^-24, which is also that of the floats in [0.5, 1).
  const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
  return magnitude < 0x38800000 ? denormal : normal;
}
inline constexpr uint32_t half_overflow = 0x477ff000;  // the smallest magnitude that rounds to 2^16

// The bits of the nearest bfloat16, for any number that is not NaN.
DLT_HD uint32_t nearest_bfloat16(float x) { return (bits_of(x) + 0x7fff + ((bits_of(x) >> 16) & 1)) >> 16; }
inline constexpr uint32_t bfloat16_overflow = 0x7f7f8000;  // the smallest magnitude that rounds to 2^128

template <class T>
DLT_HD T narrow(float x);

template <>
DLT_HD float narrow<float>(float x) {
  return x;
}

template <>
DLT_HD BFloat16 narrow<BFloat16>(float x) {
  const uint32_t bits = bits_of(x), quiet = (bits >> 16) | 0x0040;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : nearest_bfloat16(x))};
}

template <>
DLT_HD Half narrow<Half>(float x) {
  const uint32_t sign = (bits_of(x) >> 16) & 0x8000, magnitude = bits_of(x) & 0x7fffffff;
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00, finite = nearest_half(magnitude);
  return {static_cast<uint16_t>(sign | (magnitude < half_overflow ? finite : special))};
}

// A pointer to elements whose type is only known at run time. A null pointer means that there are no elements.
struct TypedPointer {
  void* data = nullptr;
  Dtype dtype = Dtype::fp32;

  DLT_HD int64_t bytes(int64_t count) const { return count * (dtype == Dtype::fp32 ? 4 : 2); }
  DLT_HD TypedPointer from(int64_t first) const { return data ? TypedPointer{static_cast<char*>(data) + bytes(first), dtype} : *this; }
};

// Calls visit(data) with the pointer in its element type.
template <class Visit>
DLT_HD void with_type(const TypedPointer& elements, Visit&& visit) {
  switch (elements.dtype) {
    case Dtype::fp32: return visit(static_cast<float*>(elements.data));
    case Dtype::fp16: return visit(static_cast<Half*>(elements.data));
    case Dtype::bf16: return visit(static_cast<BFloat16*>(elements.data));
  }
}

DLT_HD float first_of(const TypedPointer& elements) {
  float first = 0.0f;
  with_type(elements, [&](const auto* values) DLT_HD_LAMBDA { first = widen(*values); });
  return first;
}

}  // namespace dltrain
