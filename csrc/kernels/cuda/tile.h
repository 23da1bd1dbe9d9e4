#pragma once

// The tile on CUDA: registers of a warp. Lane l holds the quads of four elements that begin at 4 l, 4 l + 128, ..., so that a lane reads
// and writes a quad by one access: 16 bytes in fp32.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/dtype.h"
#include "kernels/cuda/pack.h"
#include "kernels/message.h"
#include "kernels/tile.h"
#include "math/philox.h"

namespace dltrain::cuda {

inline constexpr unsigned warp = 32, all_lanes = 0xffffffff;

template <int size, bool full>
class Tile {
 public:
  static constexpr int quads = size / 128, held = 4 * quads;

  __device__ Tile(int64_t index, int count) : index_(index), first_(index * size), count_(full ? size : count), lane_(threadIdx.x % warp) {}

  __device__ int64_t index() const { return index_; }
  __device__ int count() const { return full ? size : count_; }

  template <class T, class F>
  __device__ void load(const T* from, F f) {
    for (int i = 0; i < held; i += 4) {
      const auto x = read(from + first_, element(i));
      for (int c = 0; c < 4; ++c) {
        if (is_present(i + c)) value_[i + c] = f(value_[i + c], widen(x.values[c]));
      }
    }
  }

  template <class T, class U, class F>
  __device__ void load(const T* from, const U* others, F f) {
    for (int i = 0; i < held; i += 4) {
      const auto x = read(from + first_, element(i));
      const auto y = read(others + first_, element(i));
      for (int c = 0; c < 4; ++c) {
        if (is_present(i + c)) value_[i + c] = f(value_[i + c], widen(x.values[c]), widen(y.values[c]));
      }
    }
  }

  __device__ void view(const float* from) {
    load(from, [](float, float x) { return x; });
  }

  template <class T, class F>
  __device__ void store(T* to, F f) const {
    for (int i = 0; i < held; i += 4) {
      Pack<T> x;
      for (int c = 0; c < 4; ++c) x.values[c] = narrow<T>(f(value_[i + c], decoded_[i + c]));
      write(to + first_, element(i), x);
    }
  }

  template <class T>
  __device__ void stream(T* to) const {
    store(to, [](float value, float) { return value; });
  }

  template <class T>
  __device__ void round(const T*) {
    for (int i = 0; i < held; ++i) value_[i] = widen(narrow<T>(value_[i]));
  }

  template <class T, class F>
  __device__ void update(T* to, const T* from, F f) const {
    for (int i = 0; i < held; i += 4) {
      auto x = read(from + first_, element(i));
      for (int c = 0; c < 4; ++c) x.values[c] = narrow<T>(f(value_[i + c], decoded_[i + c], widen(x.values[c])));
      write(to + first_, element(i), x);
    }
  }

  // These set and return the lane's own values, without access to memory.
  __device__ void take(const float (&values)[held]) {
    for (int i = 0; i < held; ++i) value_[i] = is_present(i) ? values[i] : 0.0f;
  }
  __device__ void give(float (&values)[held]) const {
    for (int i = 0; i < held; ++i) values[i] = value_[i];
  }

  template <class Codec, class F>
  __device__ void encode(typename Codec::Word* to, bool, F f) {
    using Layout = MessageLayout<Codec>;
    uint32_t word[held] = {};
    for (int i = 0; i < held; ++i) {
      code_[i] = is_present(i) ? f(value_[i], random_[i]) : 0;
      word[i % kept<Layout>] |= code_[i] << shift<Codec>(i);
    }
    // Lanes whose codes share words combine them, and the first of these lanes write the words.
    for (unsigned apart = Layout::words / 4; apart < warp; apart *= 2) {
      for (int c = 0; c < 4; ++c) word[c] |= __shfl_xor_sync(all_lanes, word[c], apart);
    }
    if (lane_ >= Layout::words / 4) return;
    for (int i = 0; i < kept<Layout>; i += 4) {
      Pack<typename Codec::Word> x;
      for (int c = 0; c < 4; ++c) x.values[c] = static_cast<typename Codec::Word>(word[i + c]);
      write(to, element(i), x);
    }
  }

  template <class Codec, class F>
  __device__ void decode(const typename Codec::Word* from, math::Decoded<Codec> decoded, F f) {
    using Layout = MessageLayout<Codec>;
    constexpr uint32_t mask = 0xffffffff >> (32 - Codec::bits);
    Pack<typename Codec::Word> word[kept<Layout> / 4];
    for (int i = 0; i < kept<Layout>; i += 4) word[i / 4] = read(from, static_cast<int>(element(i) % Layout::words));
    for (int i = 0; i < held; ++i) {
      const uint32_t code = (word[i % kept<Layout> / 4].values[i % 4] >> shift<Codec>(i)) & mask;
      if (is_present(i)) value_[i] = f(value_[i], decoded(code));
    }
  }

  template <class Codec>
  __device__ void recall(const typename Codec::Word*, math::Decoded<Codec> decoded) {
    for (int i = 0; i < held; ++i) decoded_[i] = decoded(code_[i]);
  }

  __device__ void randomize(const math::RandomStream& stream, int64_t first) {
    for (int i = 0; i < held; i += 4) {
      const math::Words words = stream.at((first + first_ + element(i)) / 4);
      for (int c = 0; c < 4; ++c) random_[i + c] = words.word[c];
    }
  }

  __device__ uint32_t largest_magnitude() const {
    uint32_t largest = 0;
    for (int i = 0; i < held; ++i) largest = larger(largest, math::magnitude_bits(value_[i]));
    for (unsigned apart = warp / 2; apart > 0; apart /= 2) largest = larger(largest, __shfl_xor_sync(all_lanes, largest, apart));
    return largest;
  }

  template <class T, class F>
  __device__ T sum(F f) const {
    T terms[held];
    for (int i = 0; i < held; ++i) terms[i] = is_present(i) ? f(first_ + element(i), value_[i]) : T(0);
    for (int half = held / 2; half >= 4; half /= 2) {
      for (int i = 0; i < half; ++i) terms[i] += terms[i + half];
    }
    for (unsigned apart = warp / 2; apart > 0; apart /= 2) {
      for (int c = 0; c < 4; ++c) terms[c] += __shfl_xor_sync(all_lanes, terms[c], apart);
    }
    return (terms[0] + terms[2]) + (terms[1] + terms[3]);
  }

  template <class T>
  __device__ void put(T* to, T number) const {
    if (lane_ == 0) *to = number;
  }

  __device__ void raise(int* flag) const { put(flag, 1); }

 private:
  // The vector type of the size of four elements, which have four bytes, two or one.
  template <class T>
  using Vector = std::conditional_t<sizeof(T) == 4, uint4, std::conditional_t<sizeof(T) == 2, uint2, unsigned>>;

  static __device__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

  // Whether the tile has an element of this index. Of a full tile that is known when it is compiled.
  __device__ bool exists(int element) const { return full || element < count_; }

  // The index in the tile of this lane's i-th element, and whether this element exists.
  __device__ int element(int i) const { return static_cast<int>(4 * lane_) + 128 * (i / 4) + i % 4; }
  __device__ bool is_present(int i) const { return exists(element(i)); }

  // The number of words that a lane holds. The lane's i-th code is in word i % kept, `shift` bits above the lowest bit.
  template <class Layout>
  static constexpr int kept = Layout::words < 128 ? 4 : Layout::words / 32;
  template <class Codec>
  __device__ int shift(int i) const {
    return element(i) / MessageLayout<Codec>::words * Codec::bits;
  }

  // Four adjacent elements, of which only those below count() exist: one access if that is possible. The store uses CUDA's intrinsic,
  // because compilers turn an assignment into four stores, to share them with the other case.
  template <class T>
  __device__ Pack<T> read(const T* from, int first) const {
    __builtin_assume(__isGlobal(from));
    if (exists(first + 3) && is_aligned(from + first)) return *reinterpret_cast<const Pack<T>*>(from + first);
    Pack<T> x = {};
    for (int c = 0; c < 4; ++c) {
      if (exists(first + c)) x.values[c] = from[first + c];
    }
    return x;
  }

  template <class T>
  __device__ void write(T* to, int first, const Pack<T>& x) const {
    __builtin_assume(__isGlobal(to));
    if (exists(first + 3) && is_aligned(to + first)) {
      Vector<T> vector;
      std::memcpy(&vector, &x, sizeof x);
      __stwb(reinterpret_cast<Vector<T>*>(to + first), vector);
      return;
    }
    for (int c = 0; c < 4; ++c) {
      if (exists(first + c)) to[first + c] = x.values[c];
    }
  }

  const int64_t index_, first_;
  const int count_;
  const unsigned lane_;
  float value_[held] = {}, decoded_[held];
  uint32_t code_[held], random_[held] = {};
};

static_assert(dltrain::Tile<Tile<256, true>> && dltrain::Tile<Tile<256, false>>);

}  // namespace dltrain::cuda
