#pragma once

// Walks the plans of all ranks symbolically and proves that together they are their collective:
//
//   R1  the sends of each round match the receives of that round
//   R2  every final chunk counts the contribution of every rank that has one exactly once
//   R3  at the end all ranks that are to have a chunk hold the final bytes made by one finalize, or the same expression of the same
//   operands R4  nothing is used before it came, and each rank encodes each chunk of which it has a part exactly once (at least once in an
//   exact
//       plan, where encoding changes no value; not where the sum stays with it)

#include <stdexcept>
#include <vector>

#include "comm/plan/plan.h"

namespace dltrain::comm {

// The text begins with the rule, e.g. "R1: round 3: ...".
class BrokenPlan : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// plans[r] is rank r's. Throws BrokenPlan.
void verify(const std::vector<Plan>& plans);

}  // namespace dltrain::comm
