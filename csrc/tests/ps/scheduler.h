#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "ps/core/core.h"

namespace dltrain::ps {

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) throw Violation(text(parts...));
}

// What a core has to do, in the plainest words: lists that are searched, and no thought of time.
class Rules {
 public:
  using Kind = Action::Kind;

  explicit Rules(const Core::Options& options)
      : options_(options),
        applied_(options.keys, std::vector<int64_t>(options.workers)),
        waiting_(options.keys),
        versions_(options.keys),
        in_grace_(options.keys) {}

  void push(int key, const Contribution& contribution, const std::vector<Action>& actions) {
    const auto [worker, clock, id] = contribution;
    const bool repeats = clock < applied_[key][worker] || find(key, worker, clock) != waiting_[key].end();
    const bool is_discarded = has_left(worker) || repeats || is_hopeless(key, worker, clock);
    if (!is_discarded && clock < applied_[key][worker] + options_.window) {
      waiting_[key].push_back(contribution);
      return follow(actions);
    }
    const char* const expected = is_discarded ? "discard" : "refuse";
    require(actions.size() == 1 && actions[0].kind == (is_discarded ? Kind::discard : Kind::refuse), "expected ", expected, " only");
    const std::vector<Contribution>& named = actions[0].contributions;
    require(actions[0].key == key && named.size() == 1 && named[0].worker == worker && named[0].clock == clock && named[0].id == id,
            "it does not name the contribution");
  }

  void pull(const Pull& pull, const std::vector<Action>& actions) {
    pulls_.push_back(pull);
    follow(actions);
  }

  void leave(int worker, const std::vector<Action>& actions) {
    if (!has_left(worker)) left_.push_back(worker);
    follow(actions);
  }

  void elapse(int key, int64_t version, const std::vector<Action>& actions) {
    if (!in_grace_[key] || version != versions_[key] + 1) return require(actions.empty(), "a grace that is over has no end");
    elapsed_ = key;
    follow(actions);
    elapsed_ = -1;
    require(versions_[key] >= version, "the end of a grace makes its version");
  }

  // Checks what a core tells of itself.
  template <class Machine>
  void compare(const Machine& core) const {
    for (int key = 0; key < options_.keys; ++key) {
      require(core.version(key) == versions_[key], "key ", key, " has version ", core.version(key), ", not ", versions_[key]);
      for (int worker = 0; worker < options_.workers; ++worker) {
        require(core.applied(key, worker) == applied_[key][worker], "applied of key ", key, " and worker ", worker);
      }
    }
    for (const Pull& pull : pulls_) {
      const std::vector<int> lacking = this->lacking(pull);
      require(!lacking.empty() && core.lacking(pull.id) == lacking, "lacking of pull ", pull.id);
    }
  }

  const std::vector<Pull>& pulls() const { return pulls_; }

  // All that later checks depend on.
  void state(std::vector<int64_t>& numbers) const {
    for (int key = 0; key < options_.keys; ++key) {
      numbers.insert(numbers.end(), {versions_[key], in_grace_[key]});
      numbers.insert(numbers.end(), applied_[key].begin(), applied_[key].end());
      std::vector<std::array<int64_t, 3>> waiting;
      for (const auto& [worker, clock, id] : waiting_[key]) waiting.push_back({worker, clock, id});
      if (options_.quorum <= 1 && !options_.grace) std::sort(waiting.begin(), waiting.end());
      for (const auto& its : waiting) numbers.insert(numbers.end(), its.begin(), its.end());
      numbers.push_back(-1);
    }
    std::vector<int64_t> pulls;
    for (const Pull& pull : pulls_) pulls.push_back(pull.id);
    std::sort(pulls.begin(), pulls.end());
    numbers.insert(numbers.end(), pulls.begin(), pulls.end());
    for (int worker = 0; worker < options_.workers; ++worker) numbers.push_back(has_left(worker) - 2);
  }

 private:
  bool has_left(int worker) const { return std::find(left_.begin(), left_.end(), worker) != left_.end(); }

  std::vector<Contribution>::const_iterator find(int key, int worker, int64_t clock) const {
    const auto is_it = [&](const Contribution& waits) { return waits.worker == worker && waits.clock == clock; };
    return std::find_if(waiting_[key].begin(), waiting_[key].end(), is_it);
  }

  int64_t received(int key, int worker) const {
    int64_t clock = applied_[key][worker];
    while (find(key, worker, clock) != waiting_[key].end()) ++clock;
    return clock;
  }

  std::size_t quorum() const {
    if (options_.quorum == Core::all) return options_.workers;
    return std::max<std::size_t>(1, std::min<std::size_t>(options_.quorum, options_.workers - left_.size()));
  }

  // Whether it waits for a push that will not come.
  bool is_hopeless(int key, int worker, int64_t clock) const {
    return std::any_of(left_.begin(), left_.end(),
                       [&](int lost) { return (options_.quorum == Core::all || lost == worker) && received(key, lost) <= clock; });
  }
  bool is_hopeless(const Pull& pull, int lost) const {
    if (!has_left(lost)) return false;
    return lost == pull.worker || (options_.quorum == Core::all && std::any_of(pull.keys.begin(), pull.keys.end(),
                                                                               [&](int key) { return received(key, lost) < pull.clock; }));
  }

  int64_t needed(const Pull& pull, int worker) const {
    if (worker == pull.worker) return pull.clock;
    return pull.staleness && !has_left(worker) ? pull.clock - *pull.staleness : 0;
  }

  // How many pushes of the worker a reader has.
  int64_t counted(const Pull& pull, int key, int worker) const {
    const bool may_wait = options_.quorum > 1 || options_.grace;
    return may_wait && !(pull.applied && worker == pull.worker) ? received(key, worker) : applied_[key][worker];
  }

  // The workers whose next push has come.
  std::size_t candidates(int key) const {
    std::size_t candidates = 0;
    for (int worker = 0; worker < options_.workers; ++worker) candidates += received(key, worker) > applied_[key][worker];
    return candidates;
  }

  bool may_come(int key, int worker) const { return !has_left(worker) && received(key, worker) == applied_[key][worker]; }
  bool have_all_come(int key) const {
    for (int worker = 0; worker < options_.workers; ++worker) {
      if (may_come(key, worker)) return false;
    }
    return true;
  }

  std::vector<int> lacking(const Pull& pull) const {
    std::vector<int> workers;
    for (int worker = 0; worker < options_.workers; ++worker) {
      const int64_t clock = options_.quorum == Core::all ? pull.clock : needed(pull, worker);
      const auto lacks = [&](int key) {
        const bool waits = received(key, pull.worker) >= pull.clock && counted(pull, key, pull.worker) < pull.clock;
        return received(key, worker) < clock || (waits && may_come(key, worker));
      };
      if (std::any_of(pull.keys.begin(), pull.keys.end(), lacks)) workers.push_back(worker);
    }
    return workers;
  }

  bool may_be_answered(const Pull& pull) const {
    for (const int key : pull.keys) {
      for (int worker = 0; worker < options_.workers; ++worker) {
        if (counted(pull, key, worker) < needed(pull, worker)) return false;
      }
    }
    return true;
  }

  void follow(const std::vector<Action>& actions) {
    for (const Action& action : actions) {
      switch (action.kind) {
        case Kind::apply: apply(action); break;
        case Kind::discard: discard(action); break;
        case Kind::refuse: throw Violation("refuse of a contribution that is in time");
        case Kind::answer:
        case Kind::fail: finish(action); break;
        case Kind::wait: wait(action); break;
      }
    }
    for (int key = 0; key < options_.keys; ++key) {
      const bool waits = in_grace_[key] && !have_all_come(key);
      require(candidates(key) < quorum() || waits, "a version of key ", key, ", or its grace, is due");
      for (const auto& [worker, clock, id] : waiting_[key]) {
        require(!is_hopeless(key, worker, clock), "push ", clock, " of worker ", worker, " waits in vain");
      }
    }
    for (const Pull& pull : pulls_) {
      require(!may_be_answered(pull), "an answer of pull ", pull.id, " is due");
      for (const int lost : left_) require(!is_hopeless(pull, lost), "pull ", pull.id, " waits in vain");
    }
  }

  void apply(const Action& action) {
    const int key = action.key;
    require(action.version == ++versions_[key], "version ", action.version, " follows ", versions_[key] - 1);
    const std::size_t count = action.contributions.size();
    require(options_.grace ? count >= quorum() && count == candidates(key) : count == quorum(), "a version of ", count, " contributions");
    require(!options_.grace || key == elapsed_ || have_all_come(key), "the grace of key ", key, " is not over");
    in_grace_[key] = false;
    elapsed_ = -1;
    std::vector<std::ptrdiff_t> arrivals;
    std::vector<int> workers;
    for (const auto& [worker, clock, id] : action.contributions) {
      const auto it = find(key, worker, clock);
      require(it != waiting_[key].end() && it->id == id, "apply of push ", clock, " of worker ", worker, ", which does not wait");
      require(std::find(workers.begin(), workers.end(), worker) == workers.end(), "worker ", worker, " is twice in a version");
      require(clock == applied_[key][worker], "push ", clock, " of worker ", worker, " follows ", applied_[key][worker], " pushes");
      require(options_.quorum != Core::all || clock == action.version - 1, "clock ", clock, " in version ", action.version);
      workers.push_back(worker);
      arrivals.push_back(it - waiting_[key].begin());
    }
    require(
        options_.quorum == Core::all ? std::is_sorted(workers.begin(), workers.end()) : std::is_sorted(arrivals.begin(), arrivals.end()),
        "the order in a version of key ", key);
    for (const auto& [worker, clock, id] : action.contributions) {
      waiting_[key].erase(find(key, worker, clock));
      ++applied_[key][worker];
    }
  }

  void wait(const Action& action) {
    const int key = action.key;
    require(options_.grace && !in_grace_[key] && action.version == versions_[key] + 1, "wait for version ", action.version);
    require(candidates(key) >= quorum() && !have_all_come(key), "wait for key ", key, ", which is not in need of it");
    in_grace_[key] = true;
  }

  void discard(const Action& action) {
    for (const auto& [worker, clock, id] : action.contributions) {
      const auto it = find(action.key, worker, clock);
      require(it != waiting_[action.key].end() && it->id == id && is_hopeless(action.key, worker, clock), "discard of push ", clock,
              " of worker ", worker);
    }
    // Only now: others become no less hopeless when one is gone.
    for (const auto& [worker, clock, id] : action.contributions) waiting_[action.key].erase(find(action.key, worker, clock));
  }

  void finish(const Action& action) {
    const auto it = std::find_if(pulls_.begin(), pulls_.end(), [&](const Pull& pull) { return pull.id == action.pull; });
    require(it != pulls_.end(), "pull ", action.pull, " does not wait");
    if (action.kind == Kind::fail) {
      require(is_hopeless(*it, action.worker), "pull ", action.pull, " need not fail for worker ", action.worker);
    } else {
      require(may_be_answered(*it) && action.worker == it->worker, "pull ", action.pull, " of worker ", it->worker, " is too early");
    }
    pulls_.erase(it);
  }

  Core::Options options_;
  std::vector<std::vector<int64_t>> applied_;
  std::vector<std::vector<Contribution>> waiting_;  // of each key, as they came
  std::vector<int64_t> versions_;
  std::vector<bool> in_grace_;  // of each key
  int elapsed_ = -1;            // the key whose grace is over now
  std::vector<Pull> pulls_;
  std::vector<int> left_;  // as they left
};

// A core whose every event is checked.
template <class Machine>
class Checked {
 public:
  explicit Checked(const Core::Options& options) : core_(options), rules_(options) {}

  // Each returns what follows, until the next call.
  const std::vector<Action>& push(int key, const Contribution& contribution) {
    return checked([&](auto& of, auto& actions) { of.push(key, contribution, actions); });
  }
  const std::vector<Action>& pull(const Pull& pull) {
    return checked([&](auto& of, auto& actions) { of.pull(pull, actions); });
  }
  const std::vector<Action>& leave(int worker) {
    return checked([&](auto& of, auto& actions) { of.leave(worker, actions); });
  }
  const std::vector<Action>& elapse(int key, int64_t version) {
    return checked([&](auto& of, auto& actions) { of.elapse(key, version, actions); });
  }

  const std::vector<Pull>& pulls() const { return rules_.pulls(); }
  std::vector<int64_t> state() const {
    std::vector<int64_t> numbers = core_.state();
    rules_.state(numbers);
    return numbers;
  }

 private:
  template <class Event>
  const std::vector<Action>& checked(const Event& event) {
    actions_.clear();
    event(core_, actions_);
    event(rules_, std::as_const(actions_));
    rules_.compare(core_);
    return actions_;
  }

  Machine core_;
  Rules rules_;
  std::vector<Action> actions_;
};

struct Setting {
  Core::Options core;
  std::optional<int64_t> staleness;
  int64_t clocks = 3;  // how often each worker pushes
  int64_t period = 1;  // how often it pushes between two pulls
  int kills = 0;
  bool applied = false;  // pulls wait until the own pushes are applied, and workers push more meanwhile

  // Where a worker may wait for a quorum that will not be, its pushes are refused when too many wait.
  bool may_stall() const { return core.quorum > 1 && core.window < clocks; }
};

// What is done, and to which of those that it may be done to.
struct Step {
  enum class Kind { work, deliver, repeat, drop, kill, elapse };
  Kind kind;
  uint32_t choice;
};

// How often what happened. events: of the core.
struct Counts {
  int64_t events = 0, applied = 0, discarded = 0, refused = 0, answered = 0, failed = 0, waited = 0;
};

// Workers that pull and push and send again what is not acknowledged, a network that loses and repeats, and a server around a core. Without
// any of its steps a schedule is a schedule, too.
template <class Machine>
class Model {
 public:
  Model(const Setting& setting, Counts& counts, std::vector<std::string>* log)
      : setting_(setting), counts_(counts), log_(log), core_(setting.core), workers_(setting.core.workers) {}

  void step(const Step& step) {
    if (step.kind == Step::Kind::work || step.kind == Step::Kind::kill) {
      const int worker = static_cast<int>(step.choice % workers_.size());
      return step.kind == Step::Kind::work ? work(worker, step.choice / workers_.size()) : kill(worker);
    }
    if (step.kind == Step::Kind::elapse) return elapse(step.choice);
    if (network_.empty()) return;
    const std::size_t place = step.choice % network_.size();
    if (step.kind == Step::Kind::deliver) return deliver(place);
    if (step.kind == Step::Kind::repeat) return network_.push_back(network_[place]);
    if (network_[place].kind != Message::Kind::leave) network_.erase(network_.begin() + place);
  }

  // From here on nothing is lost.
  void settle() {
    const auto is_done = [](const Worker& worker) { return worker.is_done; };
    for (int round = 0; !std::all_of(workers_.begin(), workers_.end(), is_done); ++round) {
      require(round < 100 || setting_.may_stall(), "workers wait for ever");
      if (round == 100) return;
      for (int worker = 0; worker < std::ssize(workers_); ++worker) {
        for (std::size_t i = workers_[worker].unacknowledged.size() + 1; i-- > 0;) step({Step::Kind::work, choice(worker, i)});
      }
      while (!network_.empty()) step({Step::Kind::deliver, 0});
      while (!graces_.empty()) end_grace(0);
    }
    while (!network_.empty()) step({Step::Kind::deliver, 0});
    require(core_.pulls().empty(), "pulls wait for ever");
  }

 private:
  struct Message {
    enum class Kind { push, pull, leave, taken, reply };
    Kind kind;
    int worker;
    int key = 0;
    int64_t clock = 0;
    int64_t id = 0;
    bool failed = false;
  };
  struct Worker {
    int64_t clock = 0;
    int64_t awaited = -1;  // the pull
    bool has_pulled = false;
    bool is_done = false;
    std::vector<std::pair<int, int64_t>> unacknowledged;  // keys and clocks
  };
  struct Grace {
    int key;
    int64_t version;
    int times = 0;  // it was told to be over
  };
  struct Reply {
    int worker;
    bool is_made = false, failed = false;
  };

  uint32_t choice(int worker, std::size_t of) const { return static_cast<uint32_t>(worker + of * workers_.size()); }

  void work(int worker, std::size_t choice) {
    Worker& its = workers_[worker];
    if (its.is_done) return;
    choice %= its.unacknowledged.size() + 1;
    if (choice < its.unacknowledged.size()) {
      const auto [key, clock] = its.unacknowledged[choice];
      return send_push(worker, key, clock);
    }
    const bool is_last = its.clock == setting_.clocks;
    if (its.awaited >= 0) {
      send_pull(worker);
    } else if (!its.has_pulled && (is_last || its.clock % setting_.period == 0)) {
      its.awaited = next_id_++;
      send_pull(worker);
      if (!setting_.applied) return;
      its.awaited = -1;
      its.has_pulled = true;
    } else if (!is_last) {
      for (int key = 0; key < setting_.core.keys; ++key) {
        its.unacknowledged.emplace_back(key, its.clock);
        send_push(worker, key, its.clock);
      }
      ++its.clock;
      its.has_pulled = false;
    } else if (its.unacknowledged.empty()) {
      leave(worker);
    }
  }

  void kill(int worker) {
    if (kills_ == setting_.kills || workers_[worker].is_done) return;
    ++kills_;
    if (log_) log_->push_back(text("worker ", worker, " is killed"));
    leave(worker);
  }

  void leave(int worker) {
    workers_[worker].is_done = true;
    network_.push_back({Message::Kind::leave, worker});
  }

  void send_push(int worker, int key, int64_t clock) { network_.push_back({Message::Kind::push, worker, key, clock, next_id_++}); }

  void send_pull(int worker) { network_.push_back({Message::Kind::pull, worker, 0, workers_[worker].clock, workers_[worker].awaited}); }

  // One of the last graces, so that most are not over.
  void elapse(uint32_t choice) {
    constexpr std::size_t last = 6;
    if (!graces_.empty()) end_grace(graces_.size() - 1 - choice % std::min(graces_.size(), last));
  }

  // Some come again, and late.
  void end_grace(std::size_t place) {
    const auto [key, version, times] = graces_[place];
    if (times > 1) {
      graces_.erase(graces_.begin() + place);
    } else {
      ++graces_[place].times;
    }
    if (log_) log_->push_back(text("the grace of key ", key, " and version ", version, " is over"));
    act(core_.elapse(key, version));
  }

  void send_reply(int64_t pull) {
    const Reply& reply = replies_.at(pull);
    network_.push_back({Message::Kind::reply, reply.worker, 0, 0, pull, reply.failed});
  }

  void deliver(std::size_t place) {
    const Message message = network_[place];
    network_.erase(network_.begin() + place);
    const auto [kind, worker, key, clock, id, failed] = message;
    Worker& its = workers_[worker];
    switch (kind) {
      case Message::Kind::push: {
        if (log_) log_->push_back(text("push: worker ", worker, ", key ", key, ", clock ", clock, ", id ", id));
        const std::vector<Action>& actions = core_.push(key, {worker, clock, id});
        if (actions.empty() || actions[0].kind != Action::Kind::refuse) {
          network_.push_back({Message::Kind::taken, worker, key, clock});
        }
        return act(actions);
      }
      case Message::Kind::pull: {
        const auto [reply, is_new] = replies_.try_emplace(id, Reply{worker});
        if (is_new) {
          if (log_) log_->push_back(text("pull: worker ", worker, ", clock ", clock, ", id ", id));
          std::vector<int> keys;
          for (int i = 0; i < setting_.core.keys; ++i) keys.push_back((i + worker) % setting_.core.keys);
          act(core_.pull({id, worker, clock, setting_.staleness, keys, setting_.applied}));
        } else if (reply->second.is_made) {
          send_reply(id);
        }
        return;
      }
      case Message::Kind::leave: {
        if (log_) log_->push_back(text("leave: worker ", worker));
        return act(core_.leave(worker));
      }
      case Message::Kind::taken: {
        its.unacknowledged.erase(std::remove(its.unacknowledged.begin(), its.unacknowledged.end(), std::pair(key, clock)),
                                 its.unacknowledged.end());
        return;
      }
      case Message::Kind::reply: {
        if (its.is_done || its.awaited != id) return;
        its.awaited = -1;
        its.has_pulled = true;
        if (failed) leave(worker);
      }
    }
  }

  void act(const std::vector<Action>& actions) {
    ++counts_.events;
    for (const Action& action : actions) {
      using enum Action::Kind;
      counts_.applied += action.kind == apply;
      counts_.discarded += action.kind == discard;
      counts_.refused += action.kind == refuse;
      counts_.answered += action.kind == answer;
      counts_.failed += action.kind == fail;
      counts_.waited += action.kind == wait;
      if (action.kind == wait) graces_.push_back({action.key, action.version});
      if (action.kind != answer && action.kind != fail) continue;
      replies_.at(action.pull).is_made = true;
      replies_.at(action.pull).failed = action.kind == fail;
      send_reply(action.pull);
    }
  }

  Setting setting_;
  Counts& counts_;
  std::vector<std::string>* log_;
  Checked<Machine> core_;
  std::vector<Worker> workers_;
  std::vector<Message> network_;
  std::vector<Grace> graces_;
  std::map<int64_t, Reply> replies_;  // to all pulls that have come
  int64_t next_id_ = 0;
  int kills_ = 0;
};

// What the core violates, if it does.
template <class Machine>
std::optional<std::string> violation(const Setting& setting, const std::vector<Step>& schedule, Counts& counts,
                                     std::vector<std::string>* log = nullptr) {
  try {
    Model<Machine> model(setting, counts, log);
    for (const Step& step : schedule) model.step(step);
    model.settle();
    return std::nullopt;
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Leaves out what it can while the core still violates a rule.
template <class Machine>
std::vector<Step> shrunk(const Setting& setting, std::vector<Step> schedule) {
  Counts counts;
  for (std::size_t size = schedule.size(); size > 0; size = std::min(size / 2, schedule.size())) {
    for (std::size_t first = 0; first < schedule.size();) {
      std::vector<Step> less = schedule;
      less.erase(less.begin() + first, less.begin() + std::min(first + size, less.size()));
      if (violation<Machine>(setting, less, counts)) {
        schedule = std::move(less);
      } else {
        first += size;
      }
    }
  }
  return schedule;
}

inline Setting random_setting(std::mt19937_64& random) {
  const auto pick = [&](int64_t least, int64_t most) { return least + static_cast<int64_t>(random() % (most - least + 1)); };
  Setting setting;
  const int workers = static_cast<int>(pick(1, 4));
  const int quorum = static_cast<int>(pick(0, 2) == 0 ? pick(1, workers) : pick(0, 1));
  setting.core = {workers, static_cast<int>(pick(1, 3)), quorum, pick(1, 6), quorum != Core::all && pick(0, 1) == 0};
  if (pick(0, 3) > 0) setting.staleness = pick(0, 2);
  setting.clocks = pick(1, 6);
  setting.period = pick(1, 3);
  setting.kills = static_cast<int>(pick(0, 3) / 2 * pick(1, 2));
  setting.applied = pick(0, 3) == 0;
  return setting;
}

inline std::vector<Step> random_schedule(std::mt19937_64& random) {
  using enum Step::Kind;
  std::vector<Step> schedule(20 + random() % 300);
  for (Step& step : schedule) {
    const uint64_t of_a_thousand = random() % 1000;
    step.kind = of_a_thousand < 400   ? work
                : of_a_thousand < 790 ? deliver
                : of_a_thousand < 830 ? elapse
                : of_a_thousand < 900 ? repeat
                : of_a_thousand < 990 ? drop
                                      : kill;
    step.choice = static_cast<uint32_t>(random());
  }
  return schedule;
}

inline std::string describe(const Setting& setting) {
  const auto& [workers, keys, quorum, window, grace] = setting.core;
  return text(workers, " workers, ", keys, " keys, quorum ", quorum, grace ? " and a grace" : "", ", window ", window, ", staleness ",
              setting.staleness.value_or(-1), ", ", setting.clocks, " clocks, a pull every ", setting.period,
              setting.applied ? ", until the own pushes are applied" : "");
}

// Runs schedules until the cores have had so many events, all of which are checked. Returns the first violation with the shortest schedule
// that was found for it; empty if there is none.
template <class Machine>
std::string search(uint64_t first_seed, int64_t events, Counts& counts) {
  for (uint64_t seed = first_seed; counts.events < events; ++seed) {
    std::mt19937_64 random(seed);
    const Setting setting = random_setting(random);
    const std::vector<Step> schedule = random_schedule(random);
    if (!violation<Machine>(setting, schedule, counts)) continue;
    std::vector<std::string> log;
    Counts again;
    const auto what = violation<Machine>(setting, shrunk<Machine>(setting, schedule), again, &log);
    std::string report = text("seed ", seed, ": ", describe(setting));
    for (const std::string& line : log) report += "\n  " + line;
    return report + "\n  violates: " + what.value_or("nothing the second time");
  }
  return "";
}

}  // namespace dltrain::ps
