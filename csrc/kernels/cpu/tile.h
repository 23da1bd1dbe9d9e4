#pragma once

// The tile on the CPU: arrays in the first-level cache. The compiler knows the length of every loop, except in the last tile.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/dtype.h"
#include "core/host_device.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/fetch_ahead.h"
#include "kernels/cpu/random.h"
#include "kernels/cpu/stream.h"
#include "kernels/message.h"
#include "kernels/tile.h"
#include "math/philox.h"

namespace dltrain::cpu {

template <int size, bool full>
class Tile {
 public:
  DLT_HD Tile(int64_t index, int count) : Tile(index, count, index * size) {}
  // first: the index of the tile's first element in the arrays of elements that the methods receive.
  DLT_HD Tile(int64_t index, int count, int64_t first) : index_(index), first_(first), count_(full ? size : count) {
    if constexpr (!full) std::memset(held_, 0, sizeof(held_));
  }

  DLT_HD int64_t index() const { return index_; }
  DLT_HD int count() const { return full ? size : count_; }

  template <class T, class F>
  DLT_HD void load(const T* from, F f) {
    from += first_;
    fetch_ahead<size, second_level>(from);
    const float* const value = value_;
    const int n = count();
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) held_[i] = f(value[i], widen(from[i]));
    value_ = held_;
  }

  template <class T, class U, class F>
  DLT_HD void load(const T* from, const U* others, F f) {
    from += first_;
    others += first_;
    fetch_ahead<size, second_level>(from);
    fetch_ahead<size, second_level>(others);
    const float* const value = value_;
    const int n = count();
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) held_[i] = f(value[i], widen(from[i]), widen(others[i]));
    value_ = held_;
  }

  DLT_HD void view(const float* from) {
    if constexpr (full) {
      value_ = from + first_;
      fetch_ahead<size, second_level>(value_);
    } else {
      load(from, [](float, float x) DLT_HD_LAMBDA { return x; });
    }
  }

  template <class T, class F>
  DLT_HD void store(T* to, F f) const {
    const float* const value = value_;
    to += first_;
    const int n = count();
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) to[i] = narrow<T>(f(value[i], decoded_[i]));
  }

  template <class T>
  DLT_HD void stream(T* to) const {
    alignas(cache_line) T narrowed[size];
    const int n = count();
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) narrowed[i] = narrow<T>(held_[i]);
    cpu::stream(to + first_, narrowed, n * static_cast<int64_t>(sizeof(T)));
  }

  template <class T>
  DLT_HD void round(const T*) {
    for (int i = 0; i < size; ++i) held_[i] = widen(narrow<T>(held_[i]));
  }

  template <class T, class F>
  DLT_HD void update(T* to, const T* from, F f) const {
    const float* const value = value_;
    to += first_;
    from += first_;
    const int n = count();
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) to[i] = narrow<T>(f(value[i], decoded_[i], widen(from[i])));
  }

  template <class Codec, class F>
  DLT_HD void encode(typename Codec::Word* to, bool non_temporal, F f) {
    using Layout = MessageLayout<Codec>;
    const float* const value = value_;  // a copy, which no store of a byte can change
    alignas(cache_line) Wide<Codec> scratch[Layout::words];
    Wide<Codec>* wide = scratch;
    // Messages whose words hold several codes are small, so they are written through the cache.
    if constexpr (full && Layout::codes == 1) wide = non_temporal ? scratch : to;
    if constexpr (std::is_same_v<F, math::Nearest<math::FP16>>) {
      encode_run(wide, value, size);
    } else {
#pragma GCC ivdep
      for (int j = 0; j < Layout::words; ++j) {
        uint32_t packed = 0;
        for (int k = 0; k < Layout::codes; ++k) {
          const int i = j + k * Layout::words;
          const uint32_t code = f(value[i], random_[i]);
          packed |= (full || i < count_ ? code : 0) << (k * Codec::bits);
        }
        wide[j] = static_cast<Wide<Codec>>(packed);
      }
    }
    if constexpr (full && Layout::codes == 1) {
      if (non_temporal) cpu::stream(to, scratch, sizeof(scratch));
    } else {
      const int n = present<Layout>();
#pragma GCC ivdep
      for (int j = 0; j < n; ++j) to[j] = static_cast<typename Codec::Word>(wide[j]);
    }
  }

  template <class Codec, class F>
  DLT_HD void decode(const typename Codec::Word* from, math::Decoded<Codec> decoded, F f) {
    const float* const value = value_;
    each_decoded<Codec>(from, decoded, [&](int i, float x) DLT_HD_LAMBDA { held_[i] = f(value[i], x); });
    value_ = held_;
  }

  template <class Codec>
  DLT_HD void recall(const typename Codec::Word* words, math::Decoded<Codec> decoded) {
    each_decoded<Codec>(words, decoded, [&](int i, float x) DLT_HD_LAMBDA { decoded_[i] = x; });
  }

  DLT_HD void randomize(const math::RandomStream& stream, int64_t first) {
    random_words<10>(random_, stream, (first + first_) / 4, size / 4);
  }

  DLT_HD uint32_t largest_magnitude() const {
    const float* const value = value_;
    uint32_t largest = 0;
    for (int i = 0; i < size; ++i) {
      const uint32_t bits = math::magnitude_bits(value[i]);
      largest = bits > largest ? bits : largest;
    }
    return largest;
  }

  template <class T, class F>
  DLT_HD T sum(F f) const {
    const float* const value = value_;
    const auto term = [&](int i) DLT_HD_LAMBDA { return full || i < count_ ? f(first_ + i, value[i]) : T(0); };
    alignas(cache_line) T terms[size / 2];
    for (int m = 0; m < size / 2; ++m) terms[m] = term(m) + term(m + size / 2);
#pragma GCC unroll 16
    for (int half = size / 4; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int m = 0; m < half; ++m) terms[m] += terms[m + half];
    }
    return terms[0];
  }

  template <class T>
  DLT_HD void put(T* to, T number) const {
    *to = number;
  }

  DLT_HD void raise(int* flag) const { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }

 private:
  // Words of several codes are packed and unpacked as uint32_t: otherwise the compiler narrows or widens each code on its own.
  template <class Codec>
  using Wide = std::conditional_t<MessageLayout<Codec>::codes == 1, typename Codec::Word, uint32_t>;

  template <class Layout>
  DLT_HD int present() const {
    return full || Layout::words < count_ ? Layout::words : count_;
  }

  // Calls f(i, x) for each element x that is decoded from the words.
  template <class Codec, class F>
  DLT_HD void each_decoded(const typename Codec::Word* from, math::Decoded<Codec> decoded, F f) const {
    using Layout = MessageLayout<Codec>;
    if constexpr (std::is_same_v<Codec, math::FP16>) {
      alignas(cache_line) float widened[size];
      const int n = count();
      widen_run(widened, reinterpret_cast<const Half*>(from), n);
#pragma GCC ivdep
      for (int i = 0; i < n; ++i) f(i, widened[i]);
      return;
    }
    alignas(cache_line) Wide<Codec> scratch[Layout::words];
    const Wide<Codec>* wide = scratch;
    if constexpr (full && Layout::codes == 1) {
      wide = from;
    } else {
      const int n = present<Layout>();
#pragma GCC ivdep
      for (int j = 0; j < n; ++j) scratch[j] = from[j];
    }
    constexpr uint32_t mask = 0xffffffff >> (32 - Codec::bits);
#pragma GCC unroll 8
    for (int k = 0; k < Layout::codes; ++k) {
      const int rest = count() - k * Layout::words, n = rest < Layout::words ? rest : Layout::words;
#pragma GCC ivdep
      for (int j = 0; j < n; ++j) f(j + k * Layout::words, decoded((wide[j] >> (k * Codec::bits)) & mask));
    }
  }

  const int64_t index_, first_;
  const int count_;
  const float* value_ = held_;
  alignas(cache_line) float held_[size];
  alignas(cache_line) float decoded_[size];
  alignas(cache_line) uint32_t random_[size];
};

static_assert(dltrain::Tile<Tile<256, true>> && dltrain::Tile<Tile<256, false>>);

}  // namespace dltrain::cpu
