#include "comm/program/crossover.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>

namespace dltrain::comm {

namespace {

constexpr int64_t smallest = 4 << 10, middle = 64 << 10, largest = 4 << 20;
constexpr int most_turns = 6;
constexpr double part = 0.3;     // of the time goes to one size
constexpr double clearly = 1.1;  // so many times as fast, or noise might decide
constexpr std::string_view few_bytes = "direct";
constexpr std::string_view few_rounds_of_two[] = {"oneshot"}, few_rounds_of_more[] = {"recursive_doubling", "tree"};

// Of which the last takes every codec.
std::span<const std::string_view> few_rounds(int world_size) {
  if (world_size == 2) return few_rounds_of_two;
  return few_rounds_of_more;
}

class Race {
 public:
  Race(int world_size, Seconds time, const SumByPlan& sum, const std::function<Seconds()>& now)
      : world_size_(world_size), time_(time.count()), left_(time_), sum_(sum), now_(now), began_(now()) {}

  // The shortest that each plan took, in some turns: what else runs on the machines, and what is done for the first time, only adds.
  std::vector<double> run(const std::vector<std::string>& plans, int64_t bytes) {
    values_.assign(bytes / sizeof(float), 0.0f);
    const double end = left_ - part * time_;
    std::vector<double> shortest(plans.size(), std::numeric_limits<double>::infinity());
    for (int turn = 0; turn < most_turns; ++turn) {
      const std::vector<double> times = take_turn(plans);
      std::transform(times.begin(), times.end(), shortest.begin(), shortest.begin(), [](double a, double b) { return std::min(a, b); });
      if (left_ - total(shortest) < (turn == 0 ? 0.0 : end)) break;
    }
    return shortest;
  }

  bool has_time_for(double seconds) const { return seconds < left_; }

  static double total(const std::vector<double>& times) { return std::accumulate(times.begin(), times.end(), 0.0); }

 private:
  // The means of all ranks, in fp32, so that these are the same bits on all.
  std::vector<double> take_turn(const std::vector<std::string>& plans) {
    std::vector<float> told;
    for (const std::string& plan : plans) {
      float handshake_program = 0;
      sum_("direct", &handshake_program, 1);
      const Seconds start = now_();
      sum_(plan, values_.data(), static_cast<int64_t>(values_.size()));
      told.push_back(mean_part(now_() - start));
    }
    told.push_back(mean_part(now_() - began_));
    sum_("direct", told.data(), static_cast<int64_t>(told.size()));
    left_ = time_ - told.back();
    return {told.begin(), told.end() - 1};
  }

  float mean_part(Seconds seconds) const { return static_cast<float>(seconds.count() / world_size_); }

  const int world_size_;
  const double time_;
  double left_;  // as of the latest turn
  const SumByPlan& sum_;
  const std::function<Seconds()>& now_;
  const Seconds began_;
  std::vector<float> values_;
};

}  // namespace

std::string_view Crossover::plan_for(int64_t wire_bytes, bool lossy) const {
  for (const auto& [bytes, plan] : by_size) {
    if (wire_bytes > 2 * bytes) continue;  // halfway to the next size, which is four times as large
    return lossy && plan != few_bytes ? few_rounds(world_size).back() : std::string_view(plan);
  }
  return few_bytes;
}

Crossover look_for_crossover(int world_size, Seconds time, const SumByPlan& sum, const std::function<Seconds()>& now) {
  Crossover found{world_size, {}};
  Race race(world_size, time, sum, now);
  const auto few_rounds = comm::few_rounds(world_size);
  std::vector<std::string> plans(few_rounds.begin(), few_rounds.end());
  plans.emplace_back(few_bytes);
  bool was_few = false;
  for (int64_t bytes = middle; bytes >= smallest && bytes <= largest;) {
    const std::vector<double> times = race.run(plans, bytes);
    const auto fewest = std::min_element(times.begin(), times.end() - 1);
    const bool few = clearly * *fewest < times.back();
    found.by_size[bytes] = few ? plans[fewest - times.begin()] : std::string(few_bytes);
    const bool have_changed = bytes != middle && few != was_few;
    if (have_changed || !race.has_time_for(4 * Race::total(times))) break;
    was_few = few;
    bytes = few ? 4 * bytes : bytes / 4;
  }
  return found;
}

}  // namespace dltrain::comm
