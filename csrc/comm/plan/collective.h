#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace dltrain::comm {

// What the ranks of a group do together with a tensor that is divided into chunks:
//
//                    before                                  afterwards
//   all_reduce       each rank has a part of every chunk     every rank has the sum of every chunk
//   reduce_scatter   each rank has a part of every chunk     rank r has the sum of chunk r
//   all_gather       rank r has chunk r                      every rank has every chunk
//   broadcast        the root has every chunk                every rank has every chunk
//   reduce           each rank has a part of every chunk     the root has the sum of every chunk
enum class Collective : int32_t { all_reduce, reduce_scatter, all_gather, broadcast, reduce };

inline constexpr std::array collectives = {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
                                           Collective::broadcast, Collective::reduce};

const char* name(Collective collective);
// Throws std::invalid_argument, which names the collectives that exist.
Collective find_collective(const std::string& name);

// adds_up: parts are added; otherwise chunks are copied. is_rooted: one of the ranks is the root. has_owners: chunk r belongs to rank r.
constexpr bool adds_up(Collective collective) { return collective != Collective::all_gather && collective != Collective::broadcast; }
constexpr bool is_rooted(Collective collective) { return collective == Collective::broadcast || collective == Collective::reduce; }
constexpr bool has_owners(Collective collective) {
  return collective == Collective::reduce_scatter || collective == Collective::all_gather;
}

}  // namespace dltrain::comm
