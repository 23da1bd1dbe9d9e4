#pragma once

// Philox for adjacent counters, four or eight at a time where the processor multiplies so many words at once. The words are those of
// RandomStream::at, so they are the same for every instruction set.

#include <cstdint>

#include "core/host_device.h"
#include "math/philox.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace dltrain::cpu {

#if defined(__AVX512F__)
struct Lanes {
  static constexpr int count = 8;  // each lane has a word in its lower half; the upper half has any value
  using Vector = __m512i;

  DLT_HD static Vector all(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
  DLT_HD static Vector from(int64_t first) { return _mm512_add_epi64(_mm512_set1_epi64(first), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)); }
  DLT_HD static Vector times(Vector a, Vector b) { return _mm512_maskz_mul_epu32(0xff, a, b); }
  DLT_HD static Vector upper(Vector a) { return _mm512_maskz_srli_epi64(0xff, a, 32); }
  DLT_HD static Vector exclusive_or(Vector a, Vector b) { return _mm512_xor_si512(a, b); }
  DLT_HD static void store(uint32_t* to, Vector w0, Vector w1, Vector w2, Vector w3) {
    const Vector even = pair(w0, w1), odd = pair(w2, w3);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi64(even, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), odd));
    _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi64(even, _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15), odd));
  }

 private:
  DLT_HD static Vector pair(Vector low, Vector high) {
    return _mm512_or_si512(_mm512_and_si512(low, all(0xffffffff)), _mm512_maskz_slli_epi64(0xff, high, 32));
  }
};
#elif defined(__AVX2__)
struct Lanes {
  static constexpr int count = 4;
  using Vector = __m256i;

  DLT_HD static Vector all(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
  DLT_HD static Vector from(int64_t first) { return _mm256_add_epi64(_mm256_set1_epi64x(first), _mm256_setr_epi64x(0, 1, 2, 3)); }
  DLT_HD static Vector times(Vector a, Vector b) { return _mm256_mul_epu32(a, b); }
  DLT_HD static Vector upper(Vector a) { return _mm256_srli_epi64(a, 32); }
  DLT_HD static Vector exclusive_or(Vector a, Vector b) { return _mm256_xor_si256(a, b); }
  DLT_HD static void store(uint32_t* to, Vector w0, Vector w1, Vector w2, Vector w3) {
    const Vector even = pair(w0, w1), odd = pair(w2, w3);
    const Vector first = _mm256_unpacklo_epi64(even, odd), second = _mm256_unpackhi_epi64(even, odd);
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to + 8), _mm256_permute2x128_si256(first, second, 0x31));
  }

 private:
  DLT_HD static Vector pair(Vector low, Vector high) {
    return _mm256_or_si256(_mm256_and_si256(low, all(0xffffffff)), _mm256_slli_epi64(high, 32));
  }
};
#endif

// Four words for each of `count` counters, the i-th of which are random.at<rounds>(first + i).
template <int rounds>
DLT_HD void random_words(uint32_t* words, const math::RandomStream& random, int64_t first, int64_t count) {
#if defined(__AVX2__)
  using L = Lanes;
  constexpr int together = 2;  // vectors, since the operations of one depend on each other
  const auto mixed = [](L::Vector product, L::Vector word, uint32_t key)
                         DLT_HD_LAMBDA { return L::exclusive_or(L::exclusive_or(L::upper(product), word), L::all(key)); };
  constexpr int64_t size = together * L::count;
  for (int64_t whole = count / size; whole > 0; --whole, words += 4 * size, first += size) {
    L::Vector w0[together], w1[together], w2[together], w3[together];
    for (int v = 0; v < together; ++v) {
      w0[v] = L::from(first + v * L::count);
      w1[v] = L::upper(w0[v]);
      w2[v] = L::all(random.rank);
      w3[v] = L::all(random.seed >> 32);
    }
    math::PhiloxKeys keys = random.keys();
#pragma GCC unroll 10
    for (int round = 0; round < rounds; ++round, keys.advance()) {
      for (int v = 0; v < together; ++v) {
        const L::Vector product0 = L::times(w0[v], L::all(math::PhiloxKeys::factor0));
        const L::Vector product1 = L::times(w2[v], L::all(math::PhiloxKeys::factor1));
        w0[v] = mixed(product1, w1[v], keys.key0);
        w1[v] = product1;
        w2[v] = mixed(product0, w3[v], keys.key1);
        w3[v] = product0;
      }
    }
    for (int v = 0; v < together; ++v) L::store(words + 4 * v * L::count, w0[v], w1[v], w2[v], w3[v]);
  }
  count %= size;
#endif
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const math::Words at = random.at<rounds>(first + i);
    for (int k = 0; k < 4; ++k) words[4 * i + k] = at.word[k];
  }
}

}  // namespace dltrain::cpu
