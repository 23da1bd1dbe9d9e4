#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace dltrain::comm {

// What a call cannot go on without: a message of one of the peers, in some round.
struct Waiting {
  std::vector<int> peers;
  int round = 0;
};

// What a rank says of itself. Ranks are those of the world.
struct RankState {
  static constexpr int most = 16, everybody = -1;
  int64_t begun = 0;  // calls of the group, the one under way included
  int32_t count = 0;  // of the ranks one of which it waits for
  std::array<int32_t, most> peers{};

  static RankState of(int64_t begun, const Waiting& waiting);
};

// Why a call of a group has failed: for all ranks the same, unless several found out at one moment.
struct Diagnosis {
  enum class Cause : int32_t { left, silent, late, none, disagreement, failure };
  Cause cause = Cause::none;
  int32_t culprit = -1;   // whoever was waited for, where there is none
  int32_t found_by = -1;  // who waited,
  int32_t round = 0;      // in that round
  int64_t call = 0;       // of that call
};

// What is known of another rank: whether its end is closed, and its answer if one has come.
struct Known {
  bool left = false;
  std::optional<RankState> state;
};

// Follows who waits for whom, from those that a failed call waited for, to a rank that has left, or does not answer, or is not in the call.
// If all on the way are well, whoever else has left or does not answer is the culprit.
Diagnosis judge(int rank, int64_t call, const Waiting& waiting, const std::map<int, Known>& others);

// "the culprit is rank 3: it does not answer (found by rank 0 in round 2 of call 7)"
std::string describe(const Diagnosis& diagnosis);

}  // namespace dltrain::comm
