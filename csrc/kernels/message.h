#pragma once

// The bytes of a message, little-endian:
//
//   | scale 0 | scale 1 | ... | words of block 0 | words of block 1 | ...        scales are fp32; not all codecs have them
//
// A word holds one code or several: word j of a block holds those of elements j, j + W, j + 2W, ..., lowest bits first, where W is the
// number of words of a block. The last block may be short: it keeps that order, and ends with the last word that holds an element.

#include <cstdint>
#include <type_traits>

#include "core/host_device.h"
#include "math/block.h"

namespace dltrain {

template <class Codec>
struct MessageLayout {
  using Word = typename Codec::Word;
  static constexpr bool scaled = Codec::statistic != math::Statistic::none;
  static constexpr int tile = scaled ? Codec::block : 256;                        // elements that are processed together
  static constexpr int codes = 8 * static_cast<int>(sizeof(Word)) / Codec::bits;  // per word
  static constexpr int words = tile / codes;                                      // per tile

  // The CUDA implementation of map_blocks needs this: each lane of a warp holds four elements, and writes four words.
  static_assert(tile % 128 == 0 && tile % codes == 0 && words % 4 == 0 && (words % 128 == 0 || 128 % words == 0));

  static DLT_HD int64_t tiles(int64_t numel) { return (numel + tile - 1) / tile; }
  static DLT_HD int64_t scale_bytes(int64_t numel) { return scaled ? tiles(numel) * static_cast<int64_t>(sizeof(float)) : 0; }
  static DLT_HD int64_t bytes(int64_t numel) {
    const int64_t rest = numel % tile;
    return scale_bytes(numel) + (numel / tile * words + (rest < words ? rest : words)) * static_cast<int64_t>(sizeof(Word));
  }

  // The scale and the words of the index-th tile of a message. Byte is uint8_t or const uint8_t.
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
