#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/tensor_list.h"
#include "kernels/operations.h"
#include "math/philox.h"

namespace dltrain::cpu {

// The innermost loops of an operation. Each contiguous part of a row costs one call through a pointer, and all code behind that pointer is
// compiled for the same instruction set.
template <class Operation>
struct ElementLoop {
  void (*run)(const typename Operation::Element& element, const Signature<Operation::streams>& signature,
              const typename ListOf<Operation>::Row& row, int64_t begin, int64_t end, const math::RandomStream& random);
};
template <class Operation>
struct BlockLoop {
  void (*run)(const Operation& operation, int64_t numel, int64_t begin, int64_t end);  // begin and end count tiles
};
template <class Reduction>
struct ReduceLoop {
  void (*run)(const typename Reduction::Element& element, const Signature<Reduction::streams>& signature,
              const typename ListOf<Reduction>::Row& row, int64_t begin, int64_t end, double* sums);
};

// All loops, compiled for one instruction set.
struct Loops {
  Table<ElementLoop, Elementwise> elements;
  Table<BlockLoop, Blockwise> blocks;
  Table<ReduceLoop, Reductions> reductions;
};

struct InstructionSet {
  std::string name;
  const Loops* loops;
};

// The instruction sets that this build has and this processor supports, best first. The last one is always "portable", the baseline.
const std::vector<InstructionSet>& instruction_sets();

// The instruction set in use: the best, or the one that the environment variable DLTRAIN_INSTRUCTION_SET names. Throws
// std::invalid_argument if that one cannot be used here.
const InstructionSet& instruction_set();

inline const Loops& loops() { return *instruction_set().loops; }

}  // namespace dltrain::cpu
