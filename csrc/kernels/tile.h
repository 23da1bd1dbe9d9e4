#pragma once

// What the operations of map_blocks are written over: the elements of a block while they are worked on. Each device has its own
// (cpu/tile.h, cuda/tile.h), and both keep three numbers for each element: its value and what it decodes to, in fp32, and a random word.

#include <concepts>
#include <cstdint>

#include "core/dtype.h"
#include "math/codecs/int8.h"
#include "math/philox.h"

namespace dltrain {

// Elements of any type, units of any codec, and any callables: a concept can only ask for some, which stand for all here.
template <class T>
concept Tile =
    requires(T& tile, const T& held, const float* floats, BFloat16* elements, const BFloat16* read_only, math::Int8::Word* words,
             const math::Int8::Word* received, double* number, const math::RandomStream& random, int64_t first, bool non_temporal,
             float (*of_value)(float, float), float (*of_element)(float, float, float), uint32_t (*coded)(float, uint32_t),
             float (*decoded)(float, uint32_t), float (*recalled)(uint32_t), double (*term)(int64_t, float)) {
      // Its place among the tiles, and how many of its elements are there: the last tile may have fewer.
      { held.index() } -> std::same_as<int64_t>;
      { held.count() } -> std::same_as<int>;

      // value <- f(value, x), for each x of the elements. Before the first such call, or of view or decode, values are not defined.
      tile.load(read_only, of_value);
      // value <- x. On the CPU without a copy: who writes there changes the values, which neither stream nor round may then be asked for.
      tile.view(floats);
      // elements <- f(value, decoded).
      held.store(elements, of_value);
      // elements <- value; on the CPU past the cache.
      held.stream(elements);
      // value <- value as an element holds it; the pointer only names the element's type.
      tile.round(read_only);
      // to <- f(value, decoded, element), for each element of `from`, which may be `to`.
      held.update(elements, read_only, of_element);

      // units <- f(value, random word), a code each; on the CPU past the cache or not.
      tile.template encode<math::Int8>(words, non_temporal, coded);
      // value <- f(value, code), for each code of the units.
      tile.template decode<math::Int8>(received, decoded);
      // decoded <- f(code), for each code of what encode has made, which lies at the units.
      tile.template recall<math::Int8>(received, recalled);
      // random word <- the stream's; `first`: which of its words belongs to the first element of the first tile, a multiple of 4.
      tile.randomize(random, first);

      // Of the values, as bits, whose order is that of the magnitudes, with infinity and then NaN on top.
      { held.largest_magnitude() } -> std::same_as<uint32_t>;
      // The sum of f(index, value), halves first: s[m] + s[m + h] for h = size / 2, ..., 1.
      { held.template sum<double>(term) } -> std::same_as<double>;
      // *to <- number, which is one for the whole tile.
      held.put(number, 0.0);
    };

}  // namespace dltrain
