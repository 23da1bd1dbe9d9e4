#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace dltrain::comm {

// The fastest plan by the size of a message. Small messages need a plan of few rounds, large ones a plan of few bytes. The size at which
// the second becomes faster depends on the network, the machines and the number of ranks.
struct Crossover {
  std::map<int64_t, std::string> by_size;

  // For messages larger than all measured sizes, returns the plan of few bytes. lossy: return only plans that every codec may use.
  std::string_view plan_for(int64_t wire_bytes, bool lossy) const;
};

using Seconds = std::chrono::duration<double>;

// All-reduces raw values in place by the plan of that name, and returns when it is done.
using SumByPlan = std::function<void(const std::string& algorithm, float* values, int64_t numel)>;

// Times plans, starting at a middle size, until another plan becomes the fastest or the time is used up. All ranks call it together. They
// exchange their times by such all-reduces, so all get the same result. now: a clock.
Crossover look_for_crossover(int world_size, Seconds time, const SumByPlan& sum, const std::function<Seconds()>& now);

}  // namespace dltrain::comm
