#include "comm/fault/verdict.h"

#include <deque>
#include <set>

#include "core/check.h"

namespace dltrain::comm {

namespace {

using Manner = Verdict::Manner;

// How a rank is to blame for a call that has not come to its end.
Manner manner_of(const Known& known, int64_t call) {
  if (known.left) return Manner::left;
  if (!known.state) return Manner::silent;
  return known.state->count == 0 && known.state->begun < call ? Manner::late : Manner::none;
}

std::string describe_manner(const Verdict& verdict) {
  const std::string culprit = text("the culprit is rank ", verdict.culprit, ": ");
  switch (verdict.manner) {
    case Manner::left: return culprit + "it has left";
    case Manner::silent: return culprit + "it does not answer";
    case Manner::late: return text(culprit, "it is alive, but has not made call ", verdict.call);
    case Manner::disagreement: return text("rank ", verdict.found_by, " does not agree with rank ", verdict.culprit, " on the call");
    case Manner::failure: return culprit + "its part of the call has failed";
    case Manner::none: break;
  }
  const std::string connection = verdict.culprit < 0 ? text("a connection of rank ", verdict.found_by)
                                                     : text("the connection of the ranks ", verdict.found_by, " and ", verdict.culprit);
  return text("all ranks answer and have made the call, so ", connection, " is broken or too slow");
}

}  // namespace

State State::of(int64_t begun, const Waiting& waiting) {
  State state;
  state.begun = begun;
  state.count = waiting.peers.size() > most ? everybody : static_cast<int32_t>(waiting.peers.size());
  for (int i = 0; i < state.count; ++i) state.peers[i] = waiting.peers[i];
  return state;
}

Verdict judge(int rank, int64_t call, const Waiting& waiting, const std::map<int, Known>& others) {
  Verdict verdict{Manner::none, waiting.peers.size() == 1 ? waiting.peers[0] : -1, rank, waiting.round, call};
  const auto blame = [&](int peer, Manner manner) {
    if (manner >= verdict.manner) return;  // the surest counts, and of those the nearest
    verdict.manner = manner;
    verdict.culprit = peer;
  };
  std::set<int> seen = {rank};
  std::deque<int> next;
  const auto follow = [&](int peer) {
    if (seen.insert(peer).second) next.push_back(peer);
  };
  for (int peer : waiting.peers) follow(peer);
  for (; !next.empty(); next.pop_front()) {
    const Known& known = others.at(next.front());
    blame(next.front(), manner_of(known, call));
    if (known.left || !known.state) continue;
    for (int i = 0; i < known.state->count; ++i) follow(known.state->peers[i]);
    if (known.state->count != State::everybody) continue;
    for (const auto& [peer, _] : others) follow(peer);
  }
  if (verdict.manner != Manner::none) return verdict;
  for (const auto& [peer, known] : others) {
    if (const Manner manner = manner_of(known, call); manner != Manner::late) blame(peer, manner);
  }
  return verdict;
}

std::string describe(const Verdict& verdict) {
  return text(describe_manner(verdict), " (found by rank ", verdict.found_by, " in round ", verdict.round, " of call ", verdict.call, ")");
}

}  // namespace dltrain::comm
