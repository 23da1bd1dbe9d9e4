#pragma once

// Follows the plans of all ranks symbolically and proves that together they perform their collective:
//
//   R1  The sends of each round match the receives of that round.
//   R2  Every final chunk counts the contribution of every rank that has one exactly once.
//   R3  At the end all ranks that are to have a chunk hold the final bytes of one finalize, or the same expression of the same operands.
//   R4  Nothing is used before it has arrived. Each rank encodes each chunk of which it has a part exactly once. In an exact plan, where
//       encoding changes no value, it does so at least once. It need not encode a chunk whose sum stays on it.

#include <stdexcept>
#include <vector>

#include "comm/plan/plan.h"

namespace dltrain::comm {

// The text begins with the rule, e.g. "R1: round 3: ...".
class BrokenPlan : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// plans[r] is the plan of rank r. Throws BrokenPlan.
void verify(const std::vector<Plan>& plans);

}  // namespace dltrain::comm
