#include "comm/plan/collective.h"

#include <vector>

#include "core/check.h"

namespace dltrain::comm {

const char* name(Collective collective) {
  switch (collective) {
    case Collective::all_reduce: return "all_reduce";
    case Collective::reduce_scatter: return "reduce_scatter";
    case Collective::all_gather: return "all_gather";
    case Collective::broadcast: return "broadcast";
    case Collective::reduce: return "reduce";
  }
  return "?";
}

Collective find_collective(const std::string& wanted) {
  for (const Collective collective : collectives) {
    if (wanted == name(collective)) return collective;
  }
  std::vector<std::string> names;
  for (const Collective collective : collectives) names.push_back(name(collective));
  unknown_name("collective", names, wanted);
}

}  // namespace dltrain::comm
