#include "comm/fault/diagnosis.h"

#include <deque>
#include <set>

#include "core/check.h"

namespace dltrain::comm {

namespace {

using Cause = Diagnosis::Cause;

// Why a rank is the culprit for a call that has not completed; none if it is not.
Cause cause_of(const Known& known, int64_t call) {
  if (known.left) return Cause::left;
  if (!known.state) return Cause::silent;
  return known.state->count == 0 && known.state->begun < call ? Cause::late : Cause::none;
}

std::string describe_cause(const Diagnosis& diagnosis) {
  const std::string culprit = text("the culprit is rank ", diagnosis.culprit, ": ");
  switch (diagnosis.cause) {
    case Cause::left: return culprit + "it has left";
    case Cause::silent: return culprit + "it does not answer";
    case Cause::late: return text(culprit, "it is alive, but has not made call ", diagnosis.call);
    case Cause::disagreement: return text("rank ", diagnosis.found_by, " does not agree with rank ", diagnosis.culprit, " on the call");
    case Cause::failure: return culprit + "its part of the call has failed";
    case Cause::none: break;
  }
  const std::string connection = diagnosis.culprit < 0
                                     ? text("a connection of rank ", diagnosis.found_by)
                                     : text("the connection of the ranks ", diagnosis.found_by, " and ", diagnosis.culprit);
  return text("all ranks answer and have made the call, so ", connection, " is broken or too slow");
}

}  // namespace

RankState RankState::of(int64_t begun, const Waiting& waiting) {
  RankState state;
  state.begun = begun;
  state.count = waiting.peers.size() > most ? too_many : static_cast<int32_t>(waiting.peers.size());
  for (int i = 0; i < state.count; ++i) state.peers[i] = waiting.peers[i];
  return state;
}

Diagnosis judge(int rank, int64_t call, const Waiting& waiting, const std::map<int, Known>& others) {
  Diagnosis diagnosis{Cause::none, waiting.peers.size() == 1 ? waiting.peers[0] : -1, rank, waiting.round, call};
  const auto blame = [&](int peer, Cause cause) {
    if (cause >= diagnosis.cause) return;  // the most certain cause counts, and then the nearest rank
    diagnosis.cause = cause;
    diagnosis.culprit = peer;
  };
  std::set<int> seen = {rank};
  std::deque<int> next;
  const auto follow = [&](int peer) {
    if (seen.insert(peer).second) next.push_back(peer);
  };
  for (int peer : waiting.peers) follow(peer);
  for (; !next.empty(); next.pop_front()) {
    const Known& known = others.at(next.front());
    blame(next.front(), cause_of(known, call));
    if (known.left || !known.state) continue;
    for (int i = 0; i < known.state->count; ++i) follow(known.state->peers[i]);
    if (known.state->count != RankState::too_many) continue;
    for (const auto& [peer, _] : others) follow(peer);
  }
  if (diagnosis.cause != Cause::none) return diagnosis;
  for (const auto& [peer, known] : others) {
    if (const Cause cause = cause_of(known, call); cause != Cause::late) blame(peer, cause);
  }
  return diagnosis;
}

std::string describe(const Diagnosis& diagnosis) {
  return text(describe_cause(diagnosis), " (found by rank ", diagnosis.found_by, " in round ", diagnosis.round, " of call ", diagnosis.call,
              ")");
}

}  // namespace dltrain::comm
