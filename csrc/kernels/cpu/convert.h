#pragma once

// Converts arrays of half-precision elements to fp32 and back, by the processor's instructions for fp16 where it has them. The results are
// those of widen and narrow, so they are the same for every instruction set. The processor would keep payloads of NaNs, so narrow converts
// NaNs.

#include <cstdint>

#include "core/dtype.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace dltrain::cpu {

template <class T>
DLT_HD void widen_run(float* to, const T* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}

template <class T>
DLT_HD void narrow_run(T* to, const float* from, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) to[i] = narrow<T>(from[i]);
}

#if defined(__F16C__)
#if defined(__AVX512F__)
constexpr __mmask16 all = 0xffff;  // without a mask GCC 12 warns of uninitialised memory
#endif

DLT_HD void widen_run(float* to, const Half* from, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(all, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
  }
#endif
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (; i < count; ++i) to[i] = widen(from[i]);
}

DLT_HD void narrow_run(Half* to, const float* from, int64_t count) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    const __m512 values = _mm512_loadu_ps(from + i);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_maskz_cvtps_ph(all, values, nearest));
    if (_mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q) == 0) continue;
    for (int64_t nan = i; nan < i + 16; ++nan) to[nan] = narrow<Half>(from[nan]);
  }
#endif
  for (; i + 8 <= count; i += 8) {
    const __m256 values = _mm256_loadu_ps(from + i);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(values, nearest));
    if (_mm256_movemask_ps(_mm256_cmp_ps(values, values, _CMP_UNORD_Q)) == 0) continue;
    for (int64_t nan = i; nan < i + 8; ++nan) to[nan] = narrow<Half>(from[nan]);
  }
  for (; i < count; ++i) to[i] = narrow<Half>(from[i]);
}
#endif

}  // namespace dltrain::cpu
