#pragma once

// A plan is what ONE rank does in a collective, as data: a pure function of (collective, algorithm, rank, world size, root). It acts on
// abstract chunks and knows nothing of bytes, codecs or segments. A round is: finalize what is complete, send from what is held, receive;
// then fold what came. All its messages are posted together and may complete in any order.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/plan/collective.h"

namespace dltrain::comm {

enum class Op {
  send_partial,  // encode my part plus what I have folded in, once; equal chunks to several peers are the same bytes. What I go on with, if
                 // the plan uses it again, is what those bytes stand for
  recv_reduce,   // fold the peer's partial into mine; several in one round in rank order, mine at my own place
  finalize,      // I own it and it is complete: encode it once; my own copy becomes the decoded bytes
  send_final,    // hand on the final bytes, verbatim
  recv_final,
};

const char* name(Op op);
inline bool sends(Op op) { return op == Op::send_partial || op == Op::send_final; }
inline bool receives(Op op) { return op == Op::recv_reduce || op == Op::recv_final; }

// The chunks begin, ..., end - 1: contiguous, so that they travel as one message.
struct Chunks {
  int begin, end;
  bool operator==(const Chunks&) const = default;
};

struct Step {
  Op op;
  int peer;  // the rank at the other end; -1 for finalize
  Chunks chunks;
  bool operator==(const Step&) const = default;
};

using Round = std::vector<Step>;

struct Plan {
  Collective collective;
  std::string algorithm;
  int rank;
  int world_size;
  int chunks;
  int root = 0;  // where there is one
  std::vector<Round> rounds = {};
  bool exact = false;  // encodes an element more than once, or on several ranks alike: for codecs that lose nothing
  bool operator==(const Plan&) const = default;
};

// The algorithms that there are for a collective.
const std::vector<std::string>& algorithms(Collective collective = Collective::all_reduce);
// Names that are no plans, for an all-reduce: "auto" and "butterfly" resolve to one by size; "native" is that of the backend below.
const std::vector<std::string>& other_algorithms();

// Of a world: a plan may have rounds in proportion.
constexpr int most_ranks = 1 << 16;

// Throws std::invalid_argument for an unknown algorithm, a world too large or a rank outside of it.
Plan make_plan(Collective collective, const std::string& algorithm, int rank, int world_size, int root = 0);

// All plans are numbered, so that a message can say which one it belongs to.
int index_of(Collective collective, std::string_view algorithm);
Collective collective_of(int index);
const std::string& algorithm_of(int index);
bool is_plan(int index);  // whether it is the number of one

// Whether every rank ends with the final bytes of all, and not with a sum of its own.
bool leaves_final_bytes(int index);

// Whether a rank has nothing to do in most rounds, so that many segments are what keeps all busy.
bool is_pipelined(int index);

// How the plans of all ranks are one: by a rotation of the ranks (and chunks), or by exclusive or, each rank's becomes any other's.
enum class Symmetry { none, rotation, exclusive_or };
Symmetry symmetry(int index, int world_size);

// A picture of the plan: a line for each round, a column for each chunk.
std::string draw(const Plan& plan);
std::string to_json(const Plan& plan);

// The builders, a file for each topology. The root is rank 0.
Plan ring(int rank, int world_size);
Plan ring_reduce_scatter(int rank, int world_size);
Plan ring_all_gather(int rank, int world_size);
Plan tree(int rank, int world_size);
Plan tree_broadcast(int rank, int world_size);
Plan tree_reduce(int rank, int world_size);
Plan double_tree(int rank, int world_size);
Plan recursive_doubling(int rank, int world_size);
Plan halving_doubling(int rank, int world_size);
Plan direct(int rank, int world_size);
Plan direct_reduce_scatter(int rank, int world_size);
Plan direct_all_gather(int rank, int world_size);
Plan direct_broadcast(int rank, int world_size);
Plan direct_reduce(int rank, int world_size);
Plan oneshot(int rank, int world_size);

}  // namespace dltrain::comm
