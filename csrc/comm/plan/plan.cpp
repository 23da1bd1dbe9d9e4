#include "comm/plan/plan.h"

#include <algorithm>
#include <bit>

#include "core/check.h"

namespace dltrain::comm {

namespace {

struct Entry {
  std::string name;
  Plan (*build)(int rank, int world_size);
  Symmetry symmetry = Symmetry::none;  // exclusive_or: for powers of two
  bool pipelined = false;
  bool whole = true;  // an all-reduce
};

const std::vector<Entry>& registry() {
  static const std::vector<Entry> entries = {
      {"ring", ring, Symmetry::rotation},
      {"tree", tree, Symmetry::none, true},
      {"double_tree", double_tree, Symmetry::none, true},
      {"recursive_doubling", recursive_doubling, Symmetry::exclusive_or},
      {"halving_doubling", halving_doubling, Symmetry::exclusive_or},
      {"direct", direct, Symmetry::rotation},
      {"oneshot", oneshot, Symmetry::rotation},
      {"reduce_scatter", reduce_scatter, Symmetry::rotation, false, false},
      {"all_gather", all_gather, Symmetry::rotation, false, false},
  };
  return entries;
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

const std::vector<std::string>& plan_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Entry& entry : registry()) all.push_back(entry.name);
    return all;
  }();
  return names;
}

const std::vector<std::string>& algorithms() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Entry& entry : registry()) {
      if (entry.whole) all.push_back(entry.name);
    }
    return all;
  }();
  return names;
}

Plan make_plan(const std::string& algorithm, int rank, int world_size) {
  check(world_size >= 1, "world_size: expected at least 1, got ", world_size);
  check(world_size <= most_ranks, "world_size: expected at most ", most_ranks, ", got ", world_size);
  check(rank >= 0 && rank < world_size, "rank: expected 0 to ", world_size - 1, ", got ", rank);
  for (const Entry& entry : registry()) {
    if (entry.name == algorithm) return entry.build(rank, world_size);
  }
  unknown_name("algorithm", algorithms(), algorithm);
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

int index_of(std::string_view algorithm) {
  const auto found = std::find(plan_names().begin(), plan_names().end(), algorithm);
  if (found == plan_names().end()) unknown_name("algorithm", algorithms(), std::string(algorithm));
  return static_cast<int>(found - plan_names().begin());
}

Symmetry symmetry(int index, int world_size) {
  const Symmetry symmetry = registry()[index].symmetry;
  return symmetry == Symmetry::exclusive_or && !std::has_single_bit(static_cast<unsigned>(world_size)) ? Symmetry::none : symmetry;
}

}  // namespace dltrain::comm
