#pragma once

// The operations of map_blocks are templates over a tile: the elements of a block while they are processed. Each device has its own tile
// (cpu/tile.h, cuda/tile.h). Both have three numbers for each element: its value and its decoded value, in fp32, and a random word.

#include <concepts>
#include <cstdint>

#include "core/dtype.h"
#include "math/codecs/int8.h"
#include "math/philox.h"

namespace dltrain {

// A tile accepts elements of any type, words of any codec, and any callables. A concept can only require some of them, as examples.
template <class T>
concept Tile = requires(T& tile, const T& held, const float* floats, BFloat16* elements, const BFloat16* read_only, math::Int8::Word* words,
                        const math::Int8::Word* received, double* number, const math::RandomStream& random, int64_t first,
                        bool non_temporal, float (*of_value)(float, float), float (*of_element)(float, float, float), int* flag,
                        uint32_t (*coded)(float, uint32_t), double (*term)(int64_t, float)) {
  // The index of the tile, and the number of its elements: the last tile may have fewer than the others.
  { held.index() } -> std::same_as<int64_t>;
  { held.count() } -> std::same_as<int>;

  // value <- f(value, x) for each element x. The values are undefined before the first call of load, view or decode.
  tile.load(read_only, of_value);
  // value <- f(value, x, y) for each element x of the first and y of the second.
  tile.load(floats, read_only, of_element);
  // value <- x. The CPU makes no copy: a write to these elements changes the values, and stream and round may not be called.
  tile.view(floats);
  // elements <- f(value, decoded).
  held.store(elements, of_value);
  // elements <- value, on the CPU by non-temporal stores.
  held.stream(elements);
  // value <- value rounded to the element's type; the pointer is used only for its type.
  tile.round(read_only);
  // to <- f(value, decoded, element) for each element of `from`, which may be `to`.
  held.update(elements, read_only, of_element);

  // words <- f(value, random word), one code per element; on the CPU by non-temporal stores if non_temporal is set.
  tile.template encode<math::Int8>(words, non_temporal, coded);
  // value <- f(value, x) for each element x that is decoded from the words of a block of this scale.
  tile.template decode<math::Int8>(received, {1.0f}, of_value);
  // decoded <- the elements that are decoded from the words that encode has written.
  tile.template recall<math::Int8>(received, {1.0f});
  // random word <- that of the stream. `first` is the number of the word of the first tile's first element, a multiple of 4.
  tile.randomize(random, first);

  // The largest magnitude of the values, as bits: their order is that of the magnitudes, with infinity and then NaN at the top.
  { held.largest_magnitude() } -> std::same_as<uint32_t>;
  // The sum of s[m] = f(index, value), added up by halves: s[m] + s[m + h] for h = size / 2, ..., 1.
  { held.template sum<double>(term) } -> std::same_as<double>;
  // *to <- number, where the tile as a whole has one such number.
  held.put(number, 0.0);
  // *flag <- 1; tiles that are processed at the same time may have the same flag.
  held.raise(flag);
};

}  // namespace dltrain
