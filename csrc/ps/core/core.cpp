#include "ps/core/core.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.h"

namespace dltrain::ps {

Core::Core(const Options& options) : options_(options), quorum_(options.quorum == all ? options.workers : options.quorum) {
  check(options.workers >= 1, "workers: expected at least 1, got ", options.workers);
  check(options.keys >= 0, "keys: expected at least 0, got ", options.keys);
  check(options.quorum == all || (options.quorum >= 1 && options.quorum <= options.workers), "quorum: expected all (", all, ") or 1 to ",
        options.workers, ", the number of workers, got ", options.quorum);
  check(options.window >= 1, "window: expected at least 1, got ", options.window);
  check(!options.grace || options.quorum != all, "grace: expected none with quorum all");
  keys_.resize(options.keys);
  progress_.resize(first_of(options.keys));
  candidates_.resize(progress_.size());
  left_.resize(options.workers);
}

void Core::push(int key, const Contribution& contribution, std::vector<Action>& actions) {
  check_key(key);
  check_worker(contribution.worker);
  const auto [worker, clock, id] = contribution;
  check(clock >= 0, "clock: expected at least 0, got ", clock);
  Progress& its = progress(key, worker);
  const auto is_not_taken = [&](Action::Kind kind) { actions.push_back({kind, key, keys_[key].version, {contribution}}); };
  if (left_[worker] || clock < its.applied || clock >= keys_[key].limit) return is_not_taken(Action::Kind::discard);
  if (clock - its.applied >= options_.window) return is_not_taken(Action::Kind::refuse);

  int before = its.last;
  if (before >= 0 && waiting_[before].clock >= clock) {
    before = -1;
    int after = its.first;
    for (; waiting_[after].clock < clock; after = waiting_[after].next) before = after;
    if (waiting_[after].clock == clock) return is_not_taken(Action::Kind::discard);
  }
  if (free_ < 0) {
    free_ = static_cast<int>(waiting_.size());
    waiting_.push_back({});
  }
  const int place = std::exchange(free_, waiting_[free_].next);
  int& link = before < 0 ? its.first : waiting_[before].next;
  waiting_[place] = {clock, id, arrivals_++, link};
  link = place;
  if (its.last == before) its.last = place;
  bool has_changed = options_.quorum != all;
  if (clock == its.applied) {
    add_candidate(key, worker);
    has_changed |= make_versions(key, actions);
  }
  if (has_changed) wake(key, actions);
}

void Core::pull(Pull pull, std::vector<Action>& actions) {
  check_worker(pull.worker);
  check(pull.clock >= 0, "clock: expected at least 0, got ", pull.clock);
  check(!pull.staleness || *pull.staleness >= 0, "staleness: expected none or at least 0, got ", pull.staleness.value_or(0));
  for (const int key : pull.keys) check_key(key);
  check(find(pull.id) < 0, "pull: expected an id that no waiting pull has, got ", pull.id);
  int lost = left_[pull.worker] ? pull.worker : -1;
  for (const int key : pull.keys) {
    if (lost < 0 && pull.clock > keys_[key].limit) lost = keys_[key].limited_by;
  }
  const auto place = std::find_if(readers_.begin(), readers_.end(), [](const Reader& reader) { return !reader.waits; });
  const int reader = static_cast<int>(place - readers_.begin());
  if (place == readers_.end()) readers_.emplace_back();
  readers_[reader].pull = std::move(pull);
  readers_[reader].waits = true;
  lost < 0 ? advance(reader, actions) : finish(reader, Action::Kind::fail, lost, actions);
}

void Core::leave(int worker, std::vector<Action>& actions) {
  check_worker(worker);
  if (left_[worker]) return;
  left_[worker] = true;
  // All readers are looked at below, when all versions have been made.
  for (Key& key : keys_) key.first_watcher = key.last_watcher = -1;
  if (options_.quorum != all) quorum_ = std::min(quorum_, std::max(1, static_cast<int>(std::count(left_.begin(), left_.end(), false))));
  for (int k = 0; k < options_.keys; ++k) {
    Key& key = keys_[k];
    const int64_t last = received(k, worker);
    std::vector<Contribution> dropped;
    drop(k, worker, last, dropped);
    if (options_.quorum == all && last < key.limit) {
      key.limit = last;
      key.limited_by = worker;
      for (int other = 0; other < options_.workers; ++other) drop(k, other, last, dropped);
      if (key.version == last) key.candidates = 0;
    }
    if (!dropped.empty()) actions.push_back({Action::Kind::discard, k, key.version, std::move(dropped)});
    make_versions(k, actions);
  }
  for (int reader = 0; reader < std::ssize(readers_); ++reader) {
    if (!readers_[reader].waits) continue;
    const Pull& pull = readers_[reader].pull;
    const auto is_limited = [&](int key) { return pull.clock > keys_[key].limit; };
    if (pull.worker == worker || std::any_of(pull.keys.begin(), pull.keys.end(), is_limited)) {
      finish(reader, Action::Kind::fail, worker, actions);
    } else {
      advance(reader, actions);
    }
  }
}

void Core::elapse(int key, int64_t version, std::vector<Action>& actions) {
  check_key(key);
  if (!keys_[key].in_grace || version != keys_[key].version + 1) return;
  make_version(key, actions);
  make_versions(key, actions);
  wake(key, actions);
}

int64_t Core::version(int key) const {
  check_key(key);
  return keys_[key].version;
}

int64_t Core::applied(int key, int worker) const {
  check_key(key);
  check_worker(worker);
  return progress(key, worker).applied;
}

std::vector<int> Core::lacking(int64_t pull) const {
  const int reader = find(pull);
  check(reader >= 0, "pull: expected the id of a waiting pull, got ", pull);
  const Pull& its = readers_[reader].pull;
  std::vector<bool> lacks(options_.workers);
  for (const int key : its.keys) {
    // Its own push has come, and the version that will have it has not.
    const bool is_unmade = its.applied && counted(its, key, its.worker) < its.clock && received(key, its.worker) >= its.clock;
    for (int worker = 0; worker < options_.workers; ++worker) {
      // The versions that the reader needs have the pushes of all.
      const int64_t clock = needed(its, options_.quorum == all ? its.worker : worker);
      if (received(key, worker) < clock || (is_unmade && !left_[worker] && !is_candidate(key, worker))) lacks[worker] = true;
    }
  }
  std::vector<int> workers;
  for (int worker = 0; worker < options_.workers; ++worker) {
    if (lacks[worker]) workers.push_back(worker);
  }
  return workers;
}

std::vector<int64_t> Core::state() const {
  std::vector<int64_t> numbers(left_.begin(), left_.end());
  numbers.push_back(quorum_);
  for (int k = 0; k < options_.keys; ++k) {
    const Key& key = keys_[k];
    numbers.insert(numbers.end(), {key.version, key.limit, key.limited_by, key.candidates, key.in_grace});
    for (int i = 0; i < key.candidates; ++i) numbers.push_back(candidates_[first_of(k) + i]);
    for (int reader = key.first_watcher; reader >= 0; reader = readers_[reader].next) numbers.push_back(readers_[reader].pull.id);
    std::vector<std::pair<int64_t, std::array<int64_t, 3>>> arrived;
    for (int worker = 0; worker < options_.workers; ++worker) {
      const Progress& its = progress(k, worker);
      numbers.push_back(its.applied);
      for (int i = its.first; i >= 0; i = waiting_[i].next) {
        const auto& [clock, id, arrival, next] = waiting_[i];
        // Where versions have one worker, or all in their order, it does not count who came first.
        arrived.push_back({options_.quorum > 1 || options_.grace ? arrival : 0, {worker, clock, id}});
      }
    }
    std::sort(arrived.begin(), arrived.end());
    for (const auto& [arrival, its] : arrived) numbers.insert(numbers.end(), its.begin(), its.end());
  }
  for (const Reader& reader : readers_) {
    numbers.push_back(reader.waits);
    if (!reader.waits) continue;
    const Pull& pull = reader.pull;
    const auto position = static_cast<int64_t>(reader.position);
    numbers.insert(numbers.end(), {pull.id, pull.worker, pull.clock, pull.staleness.value_or(-1), pull.applied, position, reader.worker});
    numbers.insert(numbers.end(), pull.keys.begin(), pull.keys.end());
  }
  return numbers;
}

void Core::check_key(int key) const {
  check(key >= 0 && key < options_.keys, "key: expected one of ", options_.keys, " keys from 0 on, got ", key);
}

void Core::check_worker(int worker) const {
  check(worker >= 0 && worker < options_.workers, "worker: expected one of ", options_.workers, " workers from 0 on, got ", worker);
}

// How many pushes of the worker and the key have come without a gap.
int64_t Core::received(int key, int worker) const {
  const Progress& its = progress(key, worker);
  int64_t clock = its.applied;
  for (int i = its.first; i >= 0 && waiting_[i].clock == clock; i = waiting_[i].next) ++clock;
  return clock;
}

// How many of them a reader has.
int64_t Core::counted(const Pull& pull, int key, int worker) const {
  const Progress& its = progress(key, worker);
  const bool is_applied = options_.quorum == all || its.first < 0 || (pull.applied && worker == pull.worker);
  return is_applied ? its.applied : received(key, worker);
}

// How many pushes of the worker the pull waits for, of each key.
int64_t Core::needed(const Pull& pull, int worker) const {
  if (worker == pull.worker) return pull.clock;
  return pull.staleness && !left_[worker] ? pull.clock - *pull.staleness : 0;
}

// Whether its next push has come.
bool Core::is_candidate(int key, int worker) const {
  const Progress& its = progress(key, worker);
  return its.first >= 0 && waiting_[its.first].clock == its.applied;
}

// The index of the reader that waits with this pull; -1: none does.
int Core::find(int64_t pull) const {
  for (int reader = 0; reader < std::ssize(readers_); ++reader) {
    if (readers_[reader].waits && readers_[reader].pull.id == pull) return reader;
  }
  return -1;
}

void Core::add_candidate(int key, int worker) {
  const auto turn = [&](int of) { return options_.quorum == all ? of : waiting_[progress(key, of).first].arrival; };
  int* const candidates = &candidates_[first_of(key)];
  int place = keys_[key].candidates++;
  for (; place > 0 && turn(candidates[place - 1]) > turn(worker); --place) candidates[place] = candidates[place - 1];
  candidates[place] = worker;
}

// Of those that are left.
bool Core::have_all_pushed(int key) const {
  for (int worker = 0; worker < options_.workers; ++worker) {
    if (!left_[worker] && !is_candidate(key, worker)) return false;
  }
  return true;
}

// Those that are due. Returns whether there are any.
bool Core::make_versions(int key, std::vector<Action>& actions) {
  Key& its = keys_[key];
  const int64_t before = its.version;
  while (its.candidates >= quorum_ && (!options_.grace || have_all_pushed(key))) make_version(key, actions);
  if (its.candidates >= quorum_ && !its.in_grace) {
    its.in_grace = true;
    actions.push_back({Action::Kind::wait, key, its.version + 1, {}});
  }
  return its.version > before;
}

// Of all candidates.
void Core::make_version(int key, std::vector<Action>& actions) {
  Key& its = keys_[key];
  std::vector<Contribution> made;
  made.reserve(its.candidates);
  for (int i = 0; i < its.candidates; ++i) {
    const int worker = candidates_[first_of(key) + i];
    Progress& progressed = progress(key, worker);
    made.push_back({worker, progressed.applied++, waiting_[progressed.first].id});
    progressed.first = release(progressed.first);
    if (progressed.first < 0) progressed.last = -1;
  }
  its.candidates = 0;
  its.in_grace = false;
  for (const Contribution& contribution : made) {
    if (is_candidate(key, contribution.worker)) add_candidate(key, contribution.worker);
  }
  actions.push_back({Action::Kind::apply, key, ++its.version, std::move(made)});
}

// Those that wait for the key look again.
void Core::wake(int key, std::vector<Action>& actions) {
  keys_[key].last_watcher = -1;
  for (int reader = std::exchange(keys_[key].first_watcher, -1); reader >= 0;) {
    advance(std::exchange(reader, readers_[reader].next), actions);
  }
}

// Has the reader watch the first key that it lacks. What it once had it will not lack later, so it never looks back.
void Core::advance(int reader, std::vector<Action>& actions) {
  Reader& its = readers_[reader];
  const Pull& pull = its.pull;
  // With quorum `all` a version has the pushes of all.
  const bool own_only = options_.quorum == all || !pull.staleness || pull.clock <= *pull.staleness;
  for (; its.position < pull.keys.size(); ++its.position, its.worker = 0) {
    const int key = pull.keys[its.position];
    bool lacks = counted(pull, key, pull.worker) < pull.clock;
    if (!own_only) {
      while (its.worker < options_.workers && counted(pull, key, its.worker) >= needed(pull, its.worker)) ++its.worker;
      lacks |= its.worker < options_.workers;
    }
    if (!lacks) continue;
    Key& watched = keys_[key];
    (watched.last_watcher < 0 ? watched.first_watcher : readers_[watched.last_watcher].next) = reader;
    watched.last_watcher = reader;
    its.next = -1;
    return;
  }
  finish(reader, Action::Kind::answer, pull.worker, actions);
}

void Core::finish(int reader, Action::Kind kind, int worker, std::vector<Action>& actions) {
  actions.push_back({kind, -1, 0, {}, readers_[reader].pull.id, worker});
  readers_[reader] = {};
}

// Removes what waits of the worker and the key from that clock on.
void Core::drop(int key, int worker, int64_t from, std::vector<Contribution>& dropped) {
  Progress& its = progress(key, worker);
  its.last = -1;
  int place = its.first;
  for (; place >= 0 && waiting_[place].clock < from; place = waiting_[place].next) its.last = place;
  (its.last < 0 ? its.first : waiting_[its.last].next) = -1;
  for (; place >= 0; place = release(place)) dropped.push_back({worker, waiting_[place].clock, waiting_[place].id});
}

// Returns the one after it.
int Core::release(int waiting) { return std::exchange(waiting_[waiting].next, std::exchange(free_, waiting)); }

}  // namespace dltrain::ps
