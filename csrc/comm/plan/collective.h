#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace dltrain::comm {

// What the ranks of a group do together with a tensor that is cut into chunks:
//
//                    before                              afterwards
//   all_reduce       each rank has a part of all         all ranks have the sum of all
//   reduce_scatter   each rank has a part of all         rank r has the sum of chunk r
//   all_gather       rank r has chunk r                  all ranks have all
//   broadcast        the root has all                    all ranks have all
//   reduce           each rank has a part of all         the root has the sum of all
enum class Collective : int32_t { all_reduce, reduce_scatter, all_gather, broadcast, reduce };

inline constexpr std::array collectives = {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
                                           Collective::broadcast, Collective::reduce};

const char* name(Collective collective);
// Throws std::invalid_argument naming those there are.
Collective find_collective(const std::string& name);

// Whether parts are added up, else chunks are copied; whether one of the ranks is the root; whether chunk r is rank r's.
constexpr bool adds_up(Collective collective) { return collective != Collective::all_gather && collective != Collective::broadcast; }
constexpr bool is_rooted(Collective collective) { return collective == Collective::broadcast || collective == Collective::reduce; }
constexpr bool has_owners(Collective collective) {
  return collective == Collective::reduce_scatter || collective == Collective::all_gather;
}

}  // namespace dltrain::comm
