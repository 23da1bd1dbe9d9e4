#pragma once

// Stores that go around the cache: what is written is not read first, and nothing else is pushed out. For memory that nobody reads soon.

#include <cstdint>
#include <cstring>

#include "core/cache_line.h"
#include "core/host_device.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dltrain::cpu {

// To a line's border.
DLT_HD void stream_line(void* to, const void* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX__)
  for (int half = 0; half < 2; ++half) {
    _mm256_stream_si256(static_cast<__m256i*>(to) + half, _mm256_loadu_si256(static_cast<const __m256i*>(from) + half));
  }
#elif defined(__x86_64__)
  for (int quarter = 0; quarter < 4; ++quarter) {
    _mm_stream_si128(static_cast<__m128i*>(to) + quarter, _mm_loadu_si128(static_cast<const __m128i*>(from) + quarter));
  }
#else
  std::memcpy(to, from, cache_line);
#endif
}

// Lines that are written in part, at the ends, go through the cache.
DLT_HD void stream(void* to, const void* from, int64_t bytes) {
  auto* const out = static_cast<char*>(to);
  const auto* const in = static_cast<const char*>(from);
  const int64_t border = -reinterpret_cast<intptr_t>(to) & (cache_line - 1), head = border < bytes ? border : bytes;
  std::memcpy(out, in, head);
  int64_t at = head;
  for (; at + cache_line <= bytes; at += cache_line) stream_line(out + at, in + at);
  std::memcpy(out + at, in + at, bytes - at);
}

// What this thread has streamed comes before what it writes from now on.
DLT_HD void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace dltrain::cpu
