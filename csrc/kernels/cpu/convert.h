#pragma once

// Converts arrays of half-precision elements to fp32 and back, by the processor's instructions for fp16 where it has them. The results are
// those of widen, narrow, math/narrowing.h and math/codecs/fp16.h, so they are the same for every instruction set. The processor would keep
// payloads of NaNs, so narrow converts NaNs.

#include <cstdint>

#include "core/dtype.h"
#include "kernels/cpu/random.h"
#include "math/codecs/fp16.h"
#include "math/narrowing.h"

#if defined(__AVX2__)
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

DLT_HD void widen_run(float* to, const BFloat16* from, const uint8_t* rest, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) to[i] = math::widen({from[i], rest[i]});
}

DLT_HD void narrow_run(BFloat16* to, uint8_t* rest, const float* from, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const math::Extended x = math::extended(from[i]);
    to[i].bits = x.element.bits;
    rest[i] = x.rest;
  }
}

// Rounds stochastically. count: at most `most`. first: the index of the first element in its whole tensor.
template <int64_t most>
DLT_HD void narrow_run(BFloat16* to, const float* from, int64_t count, const math::RandomStream& random, int64_t first) {
  constexpr int64_t shared = 8;  // elements that share four words
  alignas(64) uint32_t words[most / 2 + shared];
  const int64_t before = first % shared;
  random_words<math::rounds_of_parameters>(words, random, first / shared, (before + count + shared - 1) / shared);
  const auto one = [&](int64_t i) DLT_HD_LAMBDA {
    const int64_t at = before + i;
    to[i] = math::stochastic_bfloat16(from[i], math::half_for(at, words[at / shared * 4 + at % 4]));
  };
  int64_t done = before == 0 ? 0 : shared - before < count ? shared - before : count;
  for (int64_t i = 0; i < done; ++i) one(i);
#if defined(__AVX2__)
  const __m256i half = _mm256_set1_epi32(0xffff);
  for (int64_t pairs = (count - done) / (2 * shared); pairs > 0; --pairs, done += 2 * shared) {
    const int64_t i = done;
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(words + (before + i) / 2));
    const __m256i lower = _mm256_and_si256(word, half), upper = _mm256_srli_epi32(word, 16);
    const __m256 x = _mm256_loadu_ps(from + i), y = _mm256_loadu_ps(from + i + shared);
    const __m256i sum0 = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_permute2x128_si256(lower, upper, 0x20));
    const __m256i sum1 = _mm256_add_epi32(_mm256_castps_si256(y), _mm256_permute2x128_si256(lower, upper, 0x31));
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(sum0, 16), _mm256_srli_epi32(sum1, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to + i), _mm256_permute4x64_epi64(packed, 0xd8));
    if (_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) | _mm256_movemask_ps(_mm256_cmp_ps(y, y, _CMP_UNORD_Q))) {
      for (int64_t nan = i; nan < i + 2 * shared; ++nan) one(nan);
    }
  }
#endif
  for (int64_t i = done; i < count; ++i) one(i);
}

#if defined(__F16C__)
#if defined(__AVX512F__)
constexpr __mmask16 all = 0xffff;  // without a mask GCC 12 warns of uninitialised memory
#endif

DLT_HD void widen_run(float* to, const Half* from, int64_t count) {
  const int64_t whole = count / 8 * 8;
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(all, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
  }
#endif
  for (; i < whole; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (i = whole; i < count; ++i) to[i] = widen(from[i]);
}

// Rounds to nearest. one: converts one number; it alone decides on those whose magnitude is not below `limit`, and on NaNs.
template <class T, class F>
DLT_HD void round_run(T* to, const float* from, int64_t count, float limit, F one) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const int64_t whole = count / 8 * 8;
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    const __m512 values = _mm512_loadu_ps(from + i);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_maskz_cvtps_ph(all, values, nearest));
    if (_mm512_cmp_ps_mask(_mm512_abs_ps(values), _mm512_set1_ps(limit), _CMP_NLT_UQ) == 0) continue;
    for (int64_t large = i; large < i + 16; ++large) to[large] = one(from[large]);
  }
#endif
  for (; i < whole; i += 8) {
    const __m256 values = _mm256_loadu_ps(from + i), magnitudes = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), values);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(values, nearest));
    if (_mm256_movemask_ps(_mm256_cmp_ps(magnitudes, _mm256_set1_ps(limit), _CMP_NLT_UQ)) == 0) continue;
    for (int64_t large = i; large < i + 8; ++large) to[large] = one(from[large]);
  }
  for (i = whole; i < count; ++i) to[i] = one(from[i]);
}

DLT_HD void narrow_run(Half* to, const float* from, int64_t count) {
  round_run(to, from, count, float_of(0x7f800000), [](float x) DLT_HD_LAMBDA { return narrow<Half>(x); });
}
#endif

// The codes of elements that are rounded to nearest.
DLT_HD void encode_run(math::FP16::Word* to, const float* from, int64_t count) {
  const auto one = [](float x) DLT_HD_LAMBDA { return static_cast<math::FP16::Word>(math::FP16::nearest(x)); };
#if defined(__F16C__)
  round_run(to, from, count, float_of(half_overflow), one);
#else
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) to[i] = one(from[i]);
#endif
}

}  // namespace dltrain::cpu
