#pragma once

// The bytes of a message, little-endian:
//
//   | scale 0 | scale 1 | ... | units of block 0 | units of block 1 | ...        scales fp32; only codecs of blocks have them
//
// A unit holds one code or several: unit j of a block holds those of elements j, j + U, j + 2U, ..., lowest bits first, U being the units
// of a block. The last block may be short: it keeps that order, and ends with the last unit that holds an element.

#include <cstdint>
#include <type_traits>

#include "core/host_device.h"
#include "math/block.h"

namespace dltrain {

template <class Codec>
struct MessageLayout {
  using Word = typename Codec::Word;
  static constexpr bool scaled = Codec::statistic != math::Statistic::none;
  static constexpr int tile = scaled ? Codec::block : 256;                        // elements that are worked on together
  static constexpr int codes = 8 * static_cast<int>(sizeof(Word)) / Codec::bits;  // of a unit
  static constexpr int words = tile / codes;                                      // of a tile

  // What the twins of map_blocks build on: the lanes of a warp hold four elements each, and write four units.
  static_assert(tile % 128 == 0 && tile % codes == 0 && words % 4 == 0 && (words % 128 == 0 || 128 % words == 0));

  static DLT_HD int64_t tiles(int64_t numel) { return (numel + tile - 1) / tile; }
  static DLT_HD int64_t scale_bytes(int64_t numel) { return scaled ? tiles(numel) * static_cast<int64_t>(sizeof(float)) : 0; }
  static DLT_HD int64_t bytes(int64_t numel) {
    const int64_t rest = numel % tile;
    return scale_bytes(numel) + (numel / tile * words + (rest < words ? rest : words)) * static_cast<int64_t>(sizeof(Word));
  }

  // Of the index-th tile, in a message of uint8_t or const uint8_t.
  template <class Byte>
  static DLT_HD auto* scale_at(Byte* message, int64_t index) {
    return as<float>(message) + index;
  }
  template <class Byte>
  static DLT_HD auto* words_at(Byte* message, int64_t numel, int64_t index) {
    return as<Word>(message + scale_bytes(numel)) + index * words;
  }

 private:
  template <class T, class Byte>
  static DLT_HD auto* as(Byte* bytes) {
    return reinterpret_cast<std::conditional_t<std::is_const_v<Byte>, const T, T>*>(bytes);
  }
};

}  // namespace dltrain
