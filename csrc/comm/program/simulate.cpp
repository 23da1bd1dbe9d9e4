#include "comm/program/simulate.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "comm/program/program.h"
#include "comm/program/selection.h"
#include "core/check.h"

namespace dltrain::comm {

namespace {

// What a program costs, without what it does.
struct Message {
  int to;  // a walker
  bool leaves_host;
  int64_t bytes;
};

struct Share {                   // of a segment in a tick
  double before = 0, after = 0;  // s of computing: before the sends can go, and behind them
  int receives = 0;
  std::vector<Message> sends;
};

struct Tick {
  int first = 0;  // segment at work
  std::vector<Share> shares;
};

using Costs = std::vector<Tick>;

// Where things go one after another, but for a while of `ahead` that was saved up in a pause.
class Resource {
 public:
  explicit Resource(double ahead = 0) : ahead_(ahead), free_(-ahead) {}

  struct Turn {
    double begins, ends;
  };
  // Of what takes so many seconds and can begin at `from`.
  Turn serve(double from, double seconds) {
    const double begins = std::max(free_, from);
    free_ = std::max(free_, from - ahead_) + seconds;
    return {begins, std::max(free_, from)};
  }

 private:
  double ahead_, free_;
};

class Cores {
 public:
  explicit Cores(int count) : lines_(count) {}

  // Returns when the work is done that can begin at `from`.
  double serve(double from, double seconds) {
    if (lines_.empty() || seconds == 0) return from + seconds;
    double& free = *std::min_element(lines_.begin(), lines_.end());
    return free = std::max(free, from) + seconds;
  }

 private:
  std::vector<double> lines_;
};

// Ranks whose plans are the same, but for a rotation of the ranks by whole hosts, do the same at the same time: one of them is walked for
// all. Where there is no symmetry each rank is.
class Simulation {
 public:
  Simulation(int walkers, const Network& network, const std::vector<double>& late)
      : network_(network), clocks_(late), cores_(network.cores), inside_(walkers) {
    clocks_.resize(walkers);
    const int hosts = (walkers + network.ranks_per_host - 1) / network.ranks_per_host;
    const Resource link(network.burst / network.bandwidth);
    out_.resize(hosts, link);
    in_.resize(hosts, link);
  }

  double run(const std::vector<Costs>& programs, int segments) {
    size_t ticks = 0;
    for (const Costs& costs : programs) ticks = std::max(ticks, costs.size());
    done_.assign(programs.size(), std::vector<double>(segments));
    for (size_t tick = 0; tick < ticks; ++tick) {
      for (int segment = 0; segment < segments; ++segment) step(programs, tick, segment);
    }
    return *std::max_element(clocks_.begin(), clocks_.end());
  }

 private:
  struct Sending {
    double time;  // when it is posted; then when its first byte could come
    double last;  // byte could come, if nothing came before it
    int walker;
    const Message* message;
  };

  void step(const std::vector<Costs>& programs, size_t tick, int segment) {
    order_.clear();
    for (int walker = 0; walker < std::ssize(programs); ++walker) {
      if (share(programs[walker], tick, segment)) {
        clocks_[walker] = std::max(clocks_[walker], done_[walker][segment]);
        done_[walker][segment] = 0;
        order_.push_back(walker);
      }
    }
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return clocks_[a] < clocks_[b]; });
    sendings_.clear();
    for (const int walker : order_) {
      const Share& mine = *share(programs[walker], tick, segment);
      double& clock = clocks_[walker];
      clock = cores_.serve(clock, mine.before);
      for (const Message& message : mine.sends) {
        clock += network_.overhead;
        sendings_.push_back({clock, 0, walker, &message});
      }
      clock += network_.overhead * mine.receives;
    }
    sort_by_time(sendings_);
    for (Sending& sending : sendings_) send(sending, segment);
    sort_by_time(sendings_);
    for (const Sending& sending : sendings_) receive(sending, segment);
    for (const int walker : order_) clocks_[walker] = cores_.serve(clocks_[walker], share(programs[walker], tick, segment)->after);
  }

  static void sort_by_time(std::vector<Sending>& sendings) {
    std::stable_sort(sendings.begin(), sendings.end(), [](const Sending& a, const Sending& b) { return a.time < b.time; });
  }

  double on_link(const Message& message) const {
    return static_cast<double>(message.bytes) / (message.leaves_host ? network_.bandwidth : network_.inside_bandwidth);
  }

  void send(Sending& sending, int segment) {
    const Message& message = *sending.message;
    const double copying = static_cast<double>(message.bytes) * network_.copy, copied = cores_.serve(sending.time, copying);
    Resource& link = message.leaves_host ? out_[sending.walker / network_.ranks_per_host] : inside_[sending.walker];
    const Resource::Turn turn = link.serve(copied - copying, on_link(message));
    const double sent = std::max(turn.ends, copied), latency = message.leaves_host ? network_.latency : network_.inside_latency;
    done_[sending.walker][segment] = std::max(done_[sending.walker][segment], sent);
    sending.time = turn.begins + latency;
    sending.last = sent + latency;
  }

  void receive(const Sending& sending, int segment) {
    const Message& message = *sending.message;
    double came = sending.last;
    if (message.leaves_host) came = std::max(in_[message.to / network_.ranks_per_host].serve(sending.time, on_link(message)).ends, came);
    came = std::max(cores_.serve(sending.time, static_cast<double>(message.bytes) * network_.copy), came);
    done_[message.to][segment] = std::max(done_[message.to][segment], came);
  }

  static const Share* share(const Costs& costs, size_t tick, int segment) {
    if (tick >= costs.size()) return nullptr;
    const auto& [first, shares] = costs[tick];
    return first <= segment && segment - first < std::ssize(shares) ? &shares[segment - first] : nullptr;
  }

  const Network& network_;
  std::vector<double> clocks_;             // by walker
  std::vector<std::vector<double>> done_;  // by walker and segment: when its round is over
  Cores cores_;
  std::vector<Resource> out_, in_;  // the hosts' links
  std::vector<Resource> inside_;    // by walker
  std::vector<int> order_;
  std::vector<Sending> sendings_;
};

double seconds_of(const SumStep& step, const Speed& speed) {
  const auto added = static_cast<double>(step.received.size()) - (step.own ? 0 : 1);  // else one of them is what there is
  const double each = added * speed.decode + (step.slot >= 0 ? speed.encode : 0);
  return static_cast<double>(step.region.span.count) * each;
}

Costs costs_of(const Program& program, int walkers, int rank, const Network& network, const Speed& speed) {
  Costs costs;
  int posted = static_cast<int>(program.first.size());
  for (const auto& parts : program.ticks) {
    Tick& tick = costs.emplace_back();
    tick.first = parts.empty() ? 0 : parts.front().segment;
    for (const SegmentWork& part : parts) {
      Share& share = tick.shares.emplace_back();
      for (const SumStep& step : part.sums) share.before += seconds_of(step, speed);
      for (const DecodeStep& step : part.decodes) share.after += static_cast<double>(step.region.span.count) * speed.decode;
      share.receives = static_cast<int>(part.ahead.size()) + std::exchange(posted, 0);
      for (const Transfer& transfer : part.sends) {
        const bool leaves_host = transfer.peer / network.ranks_per_host != rank / network.ranks_per_host;
        share.sends.push_back({transfer.peer % walkers, leaves_host, transfer.bytes});
      }
    }
  }
  return costs;
}

// How many ranks have to be walked.
int walkers_of(int algorithm, int world_size, const Network& network, bool all_begin_together) {
  const int per_host = network.ranks_per_host;
  const int few = per_host == 1 ? 16 : 128;  // so that symmetry, which is not all there is to a shared link, saves little
  const bool whole_hosts = world_size % per_host == 0;
  if (world_size <= few || !whole_hosts || !all_begin_together || network.cores > 0) return world_size;
  switch (symmetry(algorithm, world_size)) {
    case Symmetry::rotation: return per_host;
    case Symmetry::exclusive_or: return std::has_single_bit(static_cast<unsigned>(per_host)) ? per_host : world_size;
    case Symmetry::none: return world_size;
  }
  return world_size;
}

void check_arguments(int world_size, int64_t numel, int segments, const Network& network, const Speed& speed,
                     const std::vector<double>& late) {
  check(world_size >= 1, "world_size: expected at least 1, got ", world_size);
  constexpr int64_t largest = int64_t{1} << 46;  // times chunks or segments it is still a number
  check(world_size <= most_ranks, "world_size: expected at most ", most_ranks, ", got ", world_size);
  check(numel >= 0 && numel <= largest, "numel: expected 0 to ", largest, ", got ", numel);
  check(segments >= 0 && segments <= most_ranks, "segments: expected 0 to ", most_ranks, ", got ", segments);
  check(network.ranks_per_host >= 1, "ranks_per_host: expected at least 1, got ", network.ranks_per_host);
  check(network.cores >= 0, "cores: expected at least 0, got ", network.cores);
  check(network.bandwidth > 0, "bandwidth: expected more than 0 bytes/s, got ", network.bandwidth);
  check(network.inside_bandwidth > 0, "inside_bandwidth: expected more than 0 bytes/s, got ", network.inside_bandwidth);
  const std::pair<const char*, double> times[] = {
      {"latency", network.latency},   {"inside_latency", network.inside_latency},
      {"overhead", network.overhead}, {"copy", network.copy},
      {"encode", speed.encode},       {"decode", speed.decode},
  };
  for (const auto& [name, seconds] : times) check(seconds >= 0, name, ": expected at least 0 s, got ", seconds);
  check(network.burst >= 0, "burst: expected at least 0 bytes, got ", network.burst);
  check(late.empty() || std::ssize(late) == world_size, "late: expected one for each of ", world_size, " ranks, got ", late.size());
  for (const double seconds : late) check(seconds >= 0, "late: expected at least 0 s, got ", seconds);
}

void check_effort(const Plan& plan, int walkers, int segments) {
  constexpr int64_t most = 1 << 27;  // a few GiB, and minutes
  int64_t each = plan.chunks;
  for (const Round& round : plan.rounds) each += std::ssize(round);
  check(each <= most / walkers / segments, "world_size, segments: expected at most ", most, " steps and chunks to follow, got ", each,
        " in each of ", segments, " segments on ", walkers, " ranks");
}

}  // namespace

Estimate simulate(Collective collective, const std::string& algorithm, int world_size, int64_t numel, const Codec& codec, int segments,
                  const Network& network, const Speed& speed, const std::vector<double>& late) {
  check_arguments(world_size, numel, segments, network, speed, late);
  const auto [index, count] = select(collective, algorithm, segments, world_size, numel, codec, codec.bytes(numel));
  Estimate estimate{0, 0, 0, count, algorithm_of(index)};
  const int walkers = walkers_of(index, world_size, network, late.empty());
  std::vector<Costs> programs;
  for (int rank = 0; rank < walkers; ++rank) {
    const Plan plan = make_plan(collective, estimate.algorithm, rank, world_size);
    if (rank == 0) check_effort(plan, walkers, count);
    // One rank's chunks stand for those of all, so they must not differ: then all are like the longest.
    const int64_t grain = codec.alignment * plan.chunks * count;
    const int64_t length = walkers < world_size ? (numel + grain - 1) / grain * grain : numel;
    const Program program = lower(plan, cut_evenly(length, codec, count), codec.name == "raw" ? Result::values_in_place : Result::values);
    programs.push_back(costs_of(program, walkers, rank, network, speed));
    const double share = static_cast<double>(numel) / static_cast<double>(std::max<int64_t>(length, 1));
    estimate.wire_bytes = std::max(estimate.wire_bytes, static_cast<int64_t>(static_cast<double>(program.sent) * share));
    estimate.rounds = std::max(estimate.rounds, program.rounds);
    estimate.segments = program.segments;
  }
  estimate.seconds = Simulation(walkers, network, late).run(programs, estimate.segments);
  return estimate;
}

}  // namespace dltrain::comm
