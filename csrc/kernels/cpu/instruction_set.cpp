#include "kernels/cpu/instruction_set.h"

#include <cstdlib>

#include "core/check.h"

namespace dltrain::cpu {

namespace portable {
extern const Loops loops;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Loops loops;
}
namespace avx512 {
extern const Loops loops;
}
#endif

const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = [] {
    std::vector<InstructionSet> usable;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vl");
    if (has_avx2 && has_avx512) usable.push_back({"avx512", &avx512::loops});
    if (has_avx2) usable.push_back({"avx2", &avx2::loops});
#endif
    usable.push_back({"portable", &portable::loops});
    return usable;
  }();
  return sets;
}

const InstructionSet& instruction_set() {
  static const InstructionSet& selected = []() -> const InstructionSet& {
    const auto& sets = instruction_sets();
    const char* const wanted = std::getenv("DLTRAIN_INSTRUCTION_SET");
    if (!wanted || !*wanted) return sets.front();
    std::vector<std::string> names;
    for (const InstructionSet& set : sets) {
      if (set.name == wanted) return set;
      names.push_back(set.name);
    }
    unknown_name("DLTRAIN_INSTRUCTION_SET on this processor", names, wanted);
  }();
  return selected;
}

}  // namespace dltrain::cpu
