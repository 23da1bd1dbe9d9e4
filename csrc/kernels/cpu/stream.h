#pragma once

// Non-temporal stores, for memory that is not read soon: a line is not read before it is written, and evicts no other line from the cache.

#include <cstdint>
#include <cstring>

#include "core/cache_line.h"
#include "core/host_device.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dltrain::cpu {

// Writes one cache line; `to` is aligned to it.
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

// Writes `bytes` bytes. The lines at the ends that are written only in part are written through the cache.
DLT_HD void stream(void* to, const void* from, int64_t bytes) {
  auto* const out = static_cast<char*>(to);
  const auto* const in = static_cast<const char*>(from);
  const int64_t border = -reinterpret_cast<intptr_t>(to) & (cache_line - 1), head = border < bytes ? border : bytes;
  std::memcpy(out, in, head);
  int64_t at = head;
  for (; at + cache_line <= bytes; at += cache_line) stream_line(out + at, in + at);
  std::memcpy(out + at, in + at, bytes - at);
}

// Orders the non-temporal stores of this thread before its later stores.
DLT_HD void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace dltrain::cpu
