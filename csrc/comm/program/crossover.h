#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace dltrain::comm {

// Up to which size few rounds matter more than few bytes: the fastest plan by the bytes of a message. Small messages want few rounds, large
// ones few bytes, and where they change places depends on the network, the machines and the number of ranks.
struct Crossover {
  int world_size;
  std::map<int64_t, std::string> by_size;

  // Beyond the largest size that was looked at, the plan of few bytes. Lossy: one that every codec may go by.
  std::string_view plan_for(int64_t wire_bytes, bool lossy) const;
};

using Seconds = std::chrono::duration<double>;

// All-reduces raw values in place, by a plan's name, and returns when that is done.
using SumByPlan = std::function<void(const std::string& algorithm, float* values, int64_t numel)>;

// Finds it by timing plans, from a middle size to where they change places, as long as there is time. All ranks call it together; they
// tell each other their times by such sums, so all find the same. now: a clock.
Crossover look_for_crossover(int world_size, Seconds time, const SumByPlan& sum, const std::function<Seconds()>& now);

}  // namespace dltrain::comm
