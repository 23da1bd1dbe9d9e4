#include "comm/program/simulate.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "comm/program/program.h"
#include "comm/program/selection.h"
#include "core/check.h"

namespace dltrain::comm {

namespace {

// The following types hold the costs of a program.
struct Message {
  int to;  // a simulated rank
  bool leaves_host;
  int64_t bytes;
};

struct SegmentCosts {            // of a segment in a tick
  double before = 0, after = 0;  // s of computing before and after the sends
  int receives = 0;
  std::vector<Message> sends;
};

struct Tick {
  int first = 0;  // the first segment that has work in this tick
  std::vector<SegmentCosts> segments;
};

using Costs = std::vector<Tick>;

// Serves requests one after another. After a pause, requests of up to `ahead` seconds are served at once, as by a token bucket.
class Resource {
 public:
  explicit Resource(double ahead = 0) : ahead_(ahead), free_(-ahead) {}

  struct Turn {
    double begins, ends;
  };
  // Serves a request that takes `seconds` and can begin at `from`.
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

  // Returns the time at which work that can begin at `from` is done.
  double serve(double from, double seconds) {
    if (lines_.empty() || seconds == 0) return from + seconds;
    double& free = *std::min_element(lines_.begin(), lines_.end());
    return free = std::max(free, from) + seconds;
  }

 private:
  std::vector<double> lines_;
};

// Ranks whose plans differ only by a rotation of the ranks by whole hosts do the same at the same time, so one of them is simulated for
// all. If there is no symmetry, each rank is simulated.
class Simulation {
 public:
  Simulation(int simulated, const Network& network, const std::vector<double>& late)
      : network_(network), clocks_(late), cores_(network.cores), intra_host_(simulated) {
    clocks_.resize(simulated);
    const int hosts = (simulated + network.ranks_per_host - 1) / network.ranks_per_host;
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
    double time;  // at which it is posted; later, at which its first byte can arrive
    double last;  // the time at which its last byte can arrive, if no earlier message delays it
    int rank;
    const Message* message;
  };

  void step(const std::vector<Costs>& programs, size_t tick, int segment) {
    order_.clear();
    for (int rank = 0; rank < std::ssize(programs); ++rank) {
      if (costs_in(programs[rank], tick, segment)) {
        clocks_[rank] = std::max(clocks_[rank], done_[rank][segment]);
        done_[rank][segment] = 0;
        order_.push_back(rank);
      }
    }
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return clocks_[a] < clocks_[b]; });
    sendings_.clear();
    for (const int rank : order_) {
      const SegmentCosts& mine = *costs_in(programs[rank], tick, segment);
      double& clock = clocks_[rank];
      clock = cores_.serve(clock, mine.before);
      for (const Message& message : mine.sends) {
        clock += network_.overhead;
        sendings_.push_back({clock, 0, rank, &message});
      }
      clock += network_.overhead * mine.receives;
    }
    sort_by_time(sendings_);
    for (Sending& sending : sendings_) send(sending, segment);
    sort_by_time(sendings_);
    for (const Sending& sending : sendings_) receive(sending, segment);
    for (const int rank : order_) clocks_[rank] = cores_.serve(clocks_[rank], costs_in(programs[rank], tick, segment)->after);
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
    Resource& link = message.leaves_host ? out_[sending.rank / network_.ranks_per_host] : intra_host_[sending.rank];
    const Resource::Turn turn = link.serve(copied - copying, on_link(message));
    const double sent = std::max(turn.ends, copied), latency = message.leaves_host ? network_.latency : network_.inside_latency;
    done_[sending.rank][segment] = std::max(done_[sending.rank][segment], sent);
    sending.time = turn.begins + latency;
    sending.last = sent + latency;
  }

  void receive(const Sending& sending, int segment) {
    const Message& message = *sending.message;
    double arrived = sending.last;
    if (message.leaves_host)
      arrived = std::max(in_[message.to / network_.ranks_per_host].serve(sending.time, on_link(message)).ends, arrived);
    arrived = std::max(cores_.serve(sending.time, static_cast<double>(message.bytes) * network_.copy), arrived);
    done_[message.to][segment] = std::max(done_[message.to][segment], arrived);
  }

  static const SegmentCosts* costs_in(const Costs& costs, size_t tick, int segment) {
    if (tick >= costs.size()) return nullptr;
    const auto& [first, segments] = costs[tick];
    return first <= segment && segment - first < std::ssize(segments) ? &segments[segment - first] : nullptr;
  }

  const Network& network_;
  std::vector<double> clocks_;             // by simulated rank
  std::vector<std::vector<double>> done_;  // by simulated rank and segment: the time at which its round is complete
  Cores cores_;
  std::vector<Resource> out_, in_;    // the links of the hosts
  std::vector<Resource> intra_host_;  // by simulated rank
  std::vector<int> order_;
  std::vector<Sending> sendings_;
};

double seconds_of(const SumStep& step, const Speed& speed) {
  const auto added = static_cast<double>(step.received.size()) -
                     (step.own ? 0 : 1);  // without an own contribution, the first message is not added to anything
  const double each = added * speed.decode + (step.slot >= 0 ? speed.encode : 0);
  return static_cast<double>(step.region.span.count) * each;
}

Costs costs_of(const Program& program, int simulated, int rank, const Network& network, const Speed& speed) {
  Costs costs;
  int posted = static_cast<int>(program.first.size());
  for (const auto& parts : program.ticks) {
    Tick& tick = costs.emplace_back();
    tick.first = parts.empty() ? 0 : parts.front().segment;
    for (const SegmentWork& part : parts) {
      SegmentCosts& segment = tick.segments.emplace_back();
      for (const SumStep& step : part.sums) segment.before += seconds_of(step, speed);
      for (const DecodeStep& step : part.decodes) segment.after += static_cast<double>(step.region.span.count) * speed.decode;
      segment.receives = static_cast<int>(part.ahead.size()) + std::exchange(posted, 0);
      for (const Transfer& transfer : part.sends) {
        const bool leaves_host = transfer.peer / network.ranks_per_host != rank / network.ranks_per_host;
        segment.sends.push_back({transfer.peer % simulated, leaves_host, transfer.bytes});
      }
    }
  }
  return costs;
}

// The number of ranks that have to be simulated.
int simulated_of(int algorithm, int world_size, const Network& network, bool all_begin_together) {
  const int per_host = network.ranks_per_host;
  const int few = per_host == 1 ? 16 : 128;  // up to this many are all simulated: symmetry saves little, and is not exact for shared links
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
  constexpr int64_t largest = int64_t{1} << 46;  // its product with the number of chunks or segments does not overflow
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

constexpr int64_t most_followed = 1 << 27;  // steps of a simulation: takes a few GiB and minutes

void check_effort(const Plan& plan, int simulated, int segments) {
  int64_t each = plan.chunks;
  for (const Round& round : plan.rounds) each += std::ssize(round);
  check(each <= most_followed / simulated / segments, "world_size, segments: expected at most ", most_followed,
        " steps and chunks to follow, got ", each, " in each of ", segments, " segments on ", simulated, " ranks");
}

}  // namespace

Estimate simulate(Collective collective, const std::string& algorithm, int world_size, int64_t numel, const Codec& codec, int segments,
                  const Network& network, const Speed& speed, const std::vector<double>& late) {
  check_arguments(world_size, numel, segments, network, speed, late);
  const auto [index, count] = select(collective, algorithm, segments, world_size, numel, codec, codec.bytes(numel));
  Estimate estimate{0, 0, 0, count, algorithm_of(index)};
  const int simulated = simulated_of(index, world_size, network, late.empty());
  std::vector<Costs> programs;
  for (int rank = 0; rank < simulated; ++rank) {
    const Plan plan = make_plan(collective, estimate.algorithm, rank, world_size);
    if (rank == 0) check_effort(plan, simulated, count);
    // If one rank is simulated for others, all chunks must have the same length, that of the longest one.
    const int64_t granularity = codec.alignment * plan.chunks * count;
    const int64_t length = simulated < world_size ? (numel + granularity - 1) / granularity * granularity : numel;
    const Program program = lower(plan, cut_evenly(length, codec, count), codec.name == "raw" ? Result::values_in_place : Result::values);
    programs.push_back(costs_of(program, simulated, rank, network, speed));
    const double part = static_cast<double>(numel) / static_cast<double>(std::max<int64_t>(length, 1));
    estimate.wire_bytes = std::max(estimate.wire_bytes, static_cast<int64_t>(static_cast<double>(program.sent) * part));
    estimate.rounds = std::max(estimate.rounds, program.rounds);
    estimate.segments = program.segments;
  }
  estimate.seconds = Simulation(simulated, network, late).run(programs, estimate.segments);
  return estimate;
}

Estimate simulate_servers(int workers, int servers, int64_t numel, const Codec& codec, int segments, const Network& network,
                          const Speed& speed) {
  check_arguments(workers, numel, segments, network, speed, {});
  check(servers >= 1 && servers <= most_ranks, "servers: expected 1 to ", most_ranks, ", got ", servers);
  constexpr int64_t length = 1 << 18, pieces_of_one = 64;
  if (segments == 0) segments = static_cast<int>(std::clamp<int64_t>(numel / servers / length, 1, pieces_of_one));
  const int per_host = network.ranks_per_host, hosts = (workers + per_host - 1) / per_host;
  const int64_t ranks = (int64_t{hosts} + servers) * per_host;
  check(ranks <= most_followed / segments / segments && int64_t{workers} * servers <= most_followed / segments,
        "world_size, servers, segments: expected at most ", most_followed, " steps to follow, got ", workers, " workers and ", servers,
        " servers with ", segments, " segments");
  const auto server_rank = [&](int server) { return (hosts + server) * per_host; };
  // Each worker begins with another server, and each server with another worker, so that they do not all wait for the same link.
  const auto first_worker = [&](int server) { return static_cast<int>(int64_t{server} * workers / servers); };
  const auto first_server = [&](int worker) { return static_cast<int>(int64_t{worker} * servers / workers); };
  const auto pieces = cut_evenly(numel, codec, servers * segments);  // dealt to one server after another
  const auto count = static_cast<int>((std::ssize(pieces) + servers - 1) / servers);

  Costs worker(count + 2);
  worker.back().segments.resize(count);
  std::vector<Costs> programs(ranks);
  std::vector<int64_t> answered(servers);
  int64_t pushed = 0;
  for (int segment = 0; segment < count; ++segment) {
    worker[segment].first = segment;
    SegmentCosts& push = worker[segment].segments.emplace_back();
    SegmentCosts& pull = worker.back().segments[segment];  // a worker waits for answers only when it has pushed all pieces
    for (int server = 0; server < servers && segment * servers + server < std::ssize(pieces); ++server) {
      const int64_t elements = pieces[segment * servers + server].front().span.count, bytes = codec.bytes(elements);
      const auto each = static_cast<double>(elements);
      if (elements == 0) continue;
      push.before += each * speed.encode;
      push.sends.push_back({server_rank(server), true, bytes});
      ++push.receives;
      if (codec.name != "raw") pull.after += each * speed.decode;
      Costs& answers = programs[server_rank(server)];
      answers.resize(count + 1);
      answers[segment + 1].first = segment;
      SegmentCosts& answer = answers[segment + 1].segments.emplace_back();
      answer.before = each * (workers * speed.decode + speed.encode);
      answer.receives = workers;
      for (int i = 0; i < workers; ++i) answer.sends.push_back({(first_worker(server) + i) % workers, true, bytes});
      pushed += bytes;
      answered[server] += workers * bytes;
    }
  }
  for (int rank = 0; rank < workers; ++rank) {
    programs[rank] = worker;
    for (int segment = 0; segment < count; ++segment) {
      auto& sends = programs[rank][segment].segments.front().sends;
      std::ranges::rotate(sends, sends.begin() + std::min<std::ptrdiff_t>(first_server(rank), std::ssize(sends)));
    }
  }
  const double seconds = Simulation(static_cast<int>(ranks), network, {}).run(programs, count);
  return {seconds, std::max(pushed, std::ranges::max(answered)), 2, count, "parameter_server"};
}

}  // namespace dltrain::comm
