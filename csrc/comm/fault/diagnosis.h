#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace dltrain::comm {

// What a call waits for: a message of one of the peers in a round.
struct Waiting {
  std::vector<int> peers;
  int round = 0;
};

// What a rank reports about itself, with global ranks.
struct RankState {
  static constexpr int most = 16, too_many = -1;
  int64_t begun = 0;  // calls of the group, including the one in progress
  int32_t count = 0;  // the ranks of which one message is awaited; too_many: more than `most`
  std::array<int32_t, most> peers{};

  static RankState of(int64_t begun, const Waiting& waiting);
};

// Why a call of a group has failed. It is the same on all ranks, unless several ranks find a cause at the same time.
struct Diagnosis {
  enum class Cause : int32_t { left, silent, late, none, disagreement, failure };
  Cause cause = Cause::none;
  int32_t culprit = -1;   // if there is none, the rank that was waited for; -1: one of several
  int32_t found_by = -1;  // the rank that waited
  int32_t round = 0;      // the round in which it waited
  int64_t call = 0;       // the number of the call
};

// What is known of another rank: whether its end is closed, and its answer if one has arrived.
struct Known {
  bool left = false;
  std::optional<RankState> state;
};

// Follows which rank waits for which, from the ranks that the failed call waited for to one that has left, does not answer, or has not made
// the call. If all ranks on the way are well, the culprit is another rank that has left or does not answer.
Diagnosis judge(int rank, int64_t call, const Waiting& waiting, const std::map<int, Known>& others);

// "the culprit is rank 3: it does not answer (found by rank 0 in round 2 of call 7)"
std::string describe(const Diagnosis& diagnosis);

}  // namespace dltrain::comm
