#include "comm/plan.h"

#include <algorithm>
#include <string_view>

#include "core/check.h"

namespace dltrain::comm {

namespace {

struct Entry {
  std::string name;
  Plan (*build)(int rank, int world_size);
  bool pipelined = false;
  bool whole = true;  // an all-reduce
};

const std::vector<Entry>& registry() {
  static const std::vector<Entry> entries = {
      {"ring", ring},
      {"tree", tree, true},
      {"double_tree", double_tree, true},
      {"recursive_doubling", recursive_doubling},
      {"halving_doubling", halving_doubling},
      {"direct", direct},
      {"oneshot", oneshot},
      {"reduce_scatter", reduce_scatter, false, false},
      {"all_gather", all_gather, false, false},
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

bool is_pipelined(int index) { return registry()[index].pipelined; }

int resolve(const std::string& algorithm, int world_size, int64_t nbytes, bool lossy) {
  constexpr int64_t small = 64 << 10, ring_from = 8 << 20;
  std::string_view name = algorithm;
  if (algorithm == "butterfly") name = !lossy && nbytes <= small ? "recursive_doubling" : "halving_doubling";
  if (algorithm == "auto") {
    // Small messages want few rounds. direct has the fewest of those that do not send everything to everybody; from some size on the ring
    // wins, since it never has several ranks send to one at a time.
    name = world_size > 2 && nbytes >= ring_from ? "ring" : "direct";
    if (nbytes <= small && !lossy) name = "recursive_doubling";
    if (nbytes <= small && world_size == 2) name = "oneshot";
  }
  const auto found = std::find(plan_names().begin(), plan_names().end(), name);
  if (found == plan_names().end()) unknown_name("algorithm", algorithms(), algorithm);
  return static_cast<int>(found - plan_names().begin());
}

}  // namespace dltrain::comm
