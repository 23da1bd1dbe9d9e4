#include "comm/plan/plan.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "core/check.h"

namespace dltrain::comm {

namespace {

struct Entry {
  Collective collective;
  std::string name;
  Plan (*build)(int rank, int world_size);
  Symmetry symmetry = Symmetry::none;  // exclusive_or holds for powers of two only
  bool pipelined = false;
};

const std::vector<Entry>& registry() {
  using enum Collective;
  static const std::vector<Entry> entries = {
      {all_reduce, "ring", ring, Symmetry::rotation},
      {all_reduce, "tree", tree, Symmetry::none, true},
      {all_reduce, "double_tree", double_tree, Symmetry::none, true},
      {all_reduce, "recursive_doubling", recursive_doubling, Symmetry::exclusive_or},
      {all_reduce, "halving_doubling", halving_doubling, Symmetry::exclusive_or},
      {all_reduce, "direct", direct, Symmetry::rotation},
      {all_reduce, "oneshot", oneshot, Symmetry::rotation},
      {reduce_scatter, "direct", direct_reduce_scatter, Symmetry::rotation},
      {reduce_scatter, "ring", ring_reduce_scatter, Symmetry::rotation},
      {all_gather, "direct", direct_all_gather, Symmetry::rotation},
      {all_gather, "ring", ring_all_gather, Symmetry::rotation},
      {broadcast, "tree", tree_broadcast, Symmetry::none, true},
      {broadcast, "direct", direct_broadcast},
      {reduce, "tree", tree_reduce, Symmetry::none, true},
      {reduce, "direct", direct_reduce},
  };
  return entries;
}

// Renumbers the ranks of a plan: rank r becomes rank r + by, modulo the world size.
Plan rotated(Plan plan, int by) {
  const auto moved = [&](int rank) { return (rank + by) % plan.world_size; };
  plan.rank = moved(plan.rank);
  plan.root = moved(plan.root);
  for (Round& round : plan.rounds) {
    for (Step& step : round) {
      if (step.op != Op::finalize) step.peer = moved(step.peer);
    }
  }
  return plan;
}

}  // namespace

const char* name(Op op) {
  switch (op) {
    case Op::send_partial: return "send_partial";
    case Op::recv_reduce: return "recv_reduce";
    case Op::finalize: return "finalize";
    case Op::send_final: return "send_final";
    case Op::recv_final: return "recv_final";
  }
  return "?";
}

const std::vector<std::string>& algorithms(Collective collective) {
  static const auto names = [] {
    std::map<Collective, std::vector<std::string>> all;
    for (const Entry& entry : registry()) all[entry.collective].push_back(entry.name);
    return all;
  }();
  return names.at(collective);
}

Plan make_plan(Collective collective, const std::string& algorithm, int rank, int world_size, int root) {
  check(world_size >= 1, "world_size: expected at least 1, got ", world_size);
  check(world_size <= most_ranks, "world_size: expected at most ", most_ranks, ", got ", world_size);
  check(rank >= 0 && rank < world_size, "rank: expected 0 to ", world_size - 1, ", got ", rank);
  check(root >= 0 && root < world_size, "root: expected 0 to ", world_size - 1, ", got ", root);
  check(root == 0 || is_rooted(collective), "root: expected 0 for ", name(collective), ", got ", root);
  const Entry& entry = registry()[index_of(collective, algorithm)];
  return rotated(entry.build((rank + world_size - root) % world_size, world_size), root);
}

const std::vector<std::string>& other_algorithms() {
  static const std::vector<std::string> names = {"butterfly", "native", "auto"};
  return names;
}

bool leaves_final_bytes(int index) {
  const auto is_final = [](const Step& step) { return step.op == Op::finalize || step.op == Op::recv_final; };
  const Plan plan = registry()[index].build(0, 2);
  return std::any_of(plan.rounds.begin(), plan.rounds.end(),
                     [&](const Round& round) { return std::any_of(round.begin(), round.end(), is_final); });
}

bool is_pipelined(int index) { return registry()[index].pipelined; }

int index_of(Collective collective, std::string_view algorithm) {
  const auto& entries = registry();
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const Entry& entry) { return entry.collective == collective && entry.name == algorithm; });
  if (found == entries.end()) unknown_name("algorithm", algorithms(collective), std::string(algorithm));
  return static_cast<int>(found - entries.begin());
}

Collective collective_of(int index) { return registry()[index].collective; }
const std::string& algorithm_of(int index) { return registry()[index].name; }
bool is_plan(int index) { return index >= 0 && index < std::ssize(registry()); }

Symmetry symmetry(int index, int world_size) {
  const Symmetry symmetry = registry()[index].symmetry;
  return symmetry == Symmetry::exclusive_or && !std::has_single_bit(static_cast<unsigned>(world_size)) ? Symmetry::none : symmetry;
}

}  // namespace dltrain::comm
