#include "comm/program/crossover.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

namespace dltrain::comm {

namespace {

constexpr int64_t smallest = 4 << 10, middle = 64 << 10, largest = 4 << 20;
constexpr int most_turns = 6;
constexpr double part = 0.3;     // the part of the time that is spent on one size
constexpr double clearly = 1.1;  // the plan of few rounds must be this many times as fast, so that noise does not decide
constexpr std::string_view few_bytes = "direct";
constexpr std::string_view for_lossless = "recursive_doubling", for_lossy = "tree";  // in place of it

std::vector<std::string> plans_of_few_rounds(int world_size) {
  constexpr int few_ranks = 8;  // up to so many, a rank may send a small message to each of them
  std::vector<std::string> plans;
  if (world_size <= few_ranks) plans.emplace_back("oneshot");
  if (world_size > 2) plans.insert(plans.end(), {std::string(for_lossless), std::string(for_lossy)});
  return plans;
}

class Timings {
 public:
  Timings(int world_size, Seconds time, const SumByPlan& sum, const std::function<Seconds()>& now)
      : world_size_(world_size), time_(time.count()), left_(time_), sum_(sum), now_(now), began_(now()) {}

  // The shortest time of each plan in some turns, because other processes and first-time work only make times longer.
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
  // The means over all ranks. They are all-reduced in fp32, so that all ranks have the same bits.
  std::vector<double> take_turn(const std::vector<std::string>& plans) {
    std::vector<float> means;
    for (const std::string& plan : plans) {
      float synchronized = 0;
      sum_("direct", &synchronized, 1);
      const Seconds start = now_();
      sum_(plan, values_.data(), static_cast<int64_t>(values_.size()));
      means.push_back(mean_part(now_() - start));
    }
    means.push_back(mean_part(now_() - began_));
    sum_("direct", means.data(), static_cast<int64_t>(means.size()));
    left_ = time_ - means.back();
    return {means.begin(), means.end() - 1};
  }

  float mean_part(Seconds seconds) const { return static_cast<float>(seconds.count() / world_size_); }

  const int world_size_;
  const double time_;
  double left_;  // s, at the end of the latest turn
  const SumByPlan& sum_;
  const std::function<Seconds()>& now_;
  const Seconds began_;
  std::vector<float> values_;
};

}  // namespace

std::string_view Crossover::plan_for(int64_t wire_bytes, bool lossy) const {
  for (const auto& [bytes, plan] : by_size) {
    if (wire_bytes > 2 * bytes) continue;  // 2 * bytes: the geometric mean of this size and the next one, which is four times as large
    return lossy && plan == for_lossless ? for_lossy : std::string_view(plan);
  }
  return few_bytes;
}

Crossover look_for_crossover(int world_size, Seconds time, const SumByPlan& sum, const std::function<Seconds()>& now) {
  Crossover found;
  Timings timings(world_size, time, sum, now);
  std::vector<std::string> plans = plans_of_few_rounds(world_size);
  plans.emplace_back(few_bytes);
  bool was_few = false;
  for (int64_t bytes = middle; bytes >= smallest && bytes <= largest;) {
    const std::vector<double> times = timings.run(plans, bytes);
    const auto fewest = std::min_element(times.begin(), times.end() - 1);
    const bool few = clearly * *fewest < times.back();
    found.by_size[bytes] = few ? plans[fewest - times.begin()] : std::string(few_bytes);
    const bool have_changed = bytes != middle && few != was_few;
    if (have_changed || !timings.has_time_for(4 * Timings::total(times))) break;
    was_few = few;
    bytes = few ? 4 * bytes : bytes / 4;
  }
  return found;
}

}  // namespace dltrain::comm
