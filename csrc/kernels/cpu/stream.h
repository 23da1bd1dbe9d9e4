#pragma once

// Stores that go around the cache: what is written is not read first, and nothing else is pushed out. For memory that nobody reads soon.

#include <cstring>

#include "core/host_device.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dltrain::cpu {

inline constexpr int line_bytes = 64;

// Both on a line's border.
DLT_HD void store_line(void* to, const void* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_load_si512(from));
#elif defined(__AVX__)
  for (int half = 0; half < 2; ++half) {
    _mm256_stream_si256(static_cast<__m256i*>(to) + half, _mm256_load_si256(static_cast<const __m256i*>(from) + half));
  }
#elif defined(__x86_64__)
  for (int quarter = 0; quarter < 4; ++quarter) {
    _mm_stream_si128(static_cast<__m128i*>(to) + quarter, _mm_load_si128(static_cast<const __m128i*>(from) + quarter));
  }
#else
  std::memcpy(to, from, line_bytes);
#endif
}

// What this thread has streamed comes before what it writes from now on.
DLT_HD void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace dltrain::cpu
