#pragma once

// A plan is what one rank does in a collective, as data: a pure function of (collective, algorithm, rank, world size, root). It acts on
// abstract chunks, and does not depend on bytes, codecs or segments. In a round a rank finalizes chunks that are complete, sends, receives,
// and then folds the partials that it received. All messages of a round are posted together and may complete in any order.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/plan/collective.h"

namespace dltrain::comm {

enum class Op {
  send_partial,  // encode this rank's part and all that was folded into it, once, and send the same bytes to each peer. If the plan uses
                 // the chunk again, its value is what these bytes decode to
  recv_reduce,   // fold the peer's partial into this rank's; several in a round are folded in rank order, this rank's at its own position
  finalize,      // this rank owns the chunk, and it is complete: encode it once; this rank's copy becomes the decoded value
  send_final,    // send the final bytes unchanged
  recv_final,
};

const char* name(Op op);
inline bool sends(Op op) { return op == Op::send_partial || op == Op::send_final; }
inline bool receives(Op op) { return op == Op::recv_reduce || op == Op::recv_final; }

// The chunks begin, ..., end - 1. They are contiguous, so that they travel as one message.
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
  int root = 0;  // 0 if the collective has no root
  std::vector<Round> rounds = {};
  bool exact = false;  // encodes an element more than once, or the same one on several ranks: only for lossless codecs
  bool operator==(const Plan&) const = default;
};

// The algorithms of a collective.
const std::vector<std::string>& algorithms(Collective collective = Collective::all_reduce);
// Algorithms of an all-reduce that are not plans: "auto" and "butterfly" select a plan by size, "native" is the backend's own all-reduce.
const std::vector<std::string>& other_algorithms();

// The largest world size. It is limited because the number of rounds of a plan may be proportional to it.
constexpr int most_ranks = 1 << 16;

// Throws std::invalid_argument if the algorithm is unknown, the world is too large, or the rank or root is out of range.
Plan make_plan(Collective collective, const std::string& algorithm, int rank, int world_size, int root = 0);

// All plans are numbered, so that a message can say to which plan it belongs.
int index_of(Collective collective, std::string_view algorithm);
Collective collective_of(int index);
const std::string& algorithm_of(int index);
bool is_plan(int index);  // whether a plan has this number

// Whether every rank ends with final bytes of all chunks, and not with a sum that it computed itself.
bool leaves_final_bytes(int index);

// Whether a rank is idle in most rounds of a segment, so that many segments are needed to keep all ranks busy.
bool is_pipelined(int index);

// How the plan of one rank is turned into that of any other rank: by a rotation of the ranks (and chunks), or by exclusive or.
enum class Symmetry { none, rotation, exclusive_or };
Symmetry symmetry(int index, int world_size);

// Draws the plan as text, with a line for each round and a column for each chunk.
std::string draw(const Plan& plan);
std::string to_json(const Plan& plan);

// The builders, one file for each topology. The root is rank 0. The files give costs for p ranks and n bytes: alpha is the time of a
// message, beta the time of a byte on a link, gamma the time to add a byte.
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
