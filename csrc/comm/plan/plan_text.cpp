#include <algorithm>
#include <iomanip>
#include <sstream>
#include <utility>

#include "comm/plan/plan.h"
#include "core/check.h"

namespace dltrain::comm {

namespace {

// The result of `end - 1` is 64 bits wide because a plan that verify has not checked may have any numbers.
std::string range(const Chunks& chunks) {
  const int64_t last = int64_t{chunks.end} - 1;
  return chunks.begin == last ? text(last) : text(chunks.begin, "-", last);
}

std::string quoted(const std::string& plain) {
  std::ostringstream out;
  out << '"' << std::hex << std::setfill('0');
  for (const char c : plain) {
    if (static_cast<unsigned char>(c) < ' ') {
      out << "\\u" << std::setw(4) << int{c};
    } else {
      if (c == '"' || c == '\\') out << '\\';
      out << c;
    }
  }
  out << '"';
  return out.str();
}

char symbol(Op op) {
  switch (op) {
    case Op::send_partial: return '>';
    case Op::recv_reduce: return '+';
    case Op::finalize: return '*';
    case Op::send_final: return ')';
    case Op::recv_final: return '=';
  }
  return '?';
}

// One cell per chunk, with the symbols of the round's steps in the order in which they are done.
std::vector<std::string> cells(const Round& round, int chunks) {
  std::vector<std::string> row(chunks);
  for (Op op : {Op::finalize, Op::send_partial, Op::send_final, Op::recv_reduce, Op::recv_final}) {
    for (const Step& step : round) {
      if (step.op != op) continue;
      // A plan that verify has not checked may name chunks that do not exist.
      for (int chunk = std::max(0, step.chunks.begin); chunk < std::min(chunks, step.chunks.end); ++chunk) {
        if (row[chunk].find(symbol(op)) == std::string::npos) row[chunk] += symbol(op);
      }
    }
  }
  return row;
}

std::string describe(const Step& step) {
  const std::string chunks = range(step.chunks);
  switch (step.op) {
    case Op::send_partial: return text("send ", chunks, " to ", step.peer);
    case Op::recv_reduce: return text("fold ", chunks, " from ", step.peer);
    case Op::finalize: return text("finalize ", chunks);
    case Op::send_final: return text("send final ", chunks, " to ", step.peer);
    case Op::recv_final: return text("take final ", chunks, " from ", step.peer);
  }
  return "?";
}

}  // namespace

std::string draw(const Plan& plan) {
  constexpr int widest = 64;
  const bool grid = plan.chunks <= widest;
  std::ostringstream out;
  if (plan.collective != Collective::all_reduce) out << name(plan.collective) << " by ";
  out << plan.algorithm << ", rank " << plan.rank << " of " << plan.world_size;
  if (is_rooted(plan.collective)) out << ", root " << plan.root;
  out << ": " << plan.rounds.size() << " rounds over " << plan.chunks << " chunks\n";
  if (grid) {
    out << "round";
    for (int chunk = 0; chunk < plan.chunks; ++chunk) out << std::setw(4) << chunk;
    out << "\n";
  }
  for (size_t round = 0; round < plan.rounds.size(); ++round) {
    out << std::setw(5) << round;
    if (grid) {
      for (const auto& cell : cells(plan.rounds[round], plan.chunks)) out << std::setw(4) << (cell.empty() ? "." : cell);
    }
    const char* separator = "   ";
    for (const Step& step : plan.rounds[round]) out << std::exchange(separator, ", ") << describe(step);
    out << "\n";
  }
  if (grid) out << "> send partial   + fold received   * finalize   ) send final   = take final\n";
  return out.str();
}

std::string to_json(const Plan& plan) {
  std::ostringstream out;
  out << R"({"collective": )" << quoted(name(plan.collective)) << R"(, "algorithm": )" << quoted(plan.algorithm) << R"(, "rank": )"
      << plan.rank << R"(, "world_size": )" << plan.world_size << R"(, "chunks": )" << plan.chunks << R"(, "root": )" << plan.root
      << R"(, "exact": )" << (plan.exact ? "true" : "false") << R"(, "rounds": [)";
  const char* between_rounds = "";
  for (const Round& round : plan.rounds) {
    out << std::exchange(between_rounds, ", ") << "[";
    const char* between_steps = "";
    for (const Step& step : round) {
      out << std::exchange(between_steps, ", ") << R"({"op": ")" << name(step.op) << R"(", "peer": )" << step.peer << R"(, "chunks": [)"
          << step.chunks.begin << ", " << step.chunks.end << "]}";
    }
    out << "]";
  }
  out << "]}";
  return out.str();
}

}  // namespace dltrain::comm
