#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace dltrain::ps {

// What a worker has pushed for one key. Its clock is the number of its earlier pushes of the key.
struct Contribution {
  int worker = -1;
  int64_t clock = 0;
  int64_t id = 0;  // chosen by the caller
};

// A reader with `clock` pushes of its own. It waits for all of them and, with a staleness s, for the pushes of every other worker whose
// clock is below clock - s. With quorum `all`, and with 1 and no grace, it waits until these are applied. Else it waits until they have
// come, because what waits for a quorum could wait for ever: of 3 workers that push 3 keys to a quorum of 2, each may be left over at one
// key, and then all three would wait for a push that another one makes only after its pull.
struct Pull {
  int64_t id = 0;  // chosen by the caller; different for all pulls that wait
  int worker = -1;
  int64_t clock = 0;
  std::optional<int64_t> staleness;
  std::vector<int> keys;
  bool applied = false;  // it waits until its worker's own pushes are applied, for a worker that pushes more meanwhile
};

// What follows from an event.
struct Action {
  enum class Kind {
    apply,    // make the next version of the key of these contributions, in this order
    discard,  // these contributions are not applied: they are repeats, or nobody will read them
    refuse,   // the contribution is too far ahead of the key's version
    answer,   // read the keys of this pull now
    fail,     // this pull can never be answered, because the worker has left
    wait,     // the grace of the key's next version begins
  };
  Kind kind = Kind::apply;
  int key = -1;
  int64_t version = 0;  // of the key, after it was applied; wait: the one that is to be made
  std::vector<Contribution> contributions;
  int64_t pull = 0;
  int worker = -1;  // the reader that is answered, or who has left
};

// The clocks of one server of a store: which pushes make a version of a key, and when a pull may be answered. A state machine: it has no
// threads, no sockets and no time, and holds no values. Events may come in any order, and repeatedly; each push is applied once.
//
// With quorum `all`, version v + 1 of a key is made of the pushes of clock v of all workers, in the order of the workers. With a quorum of
// k it is made as soon as k workers have a push that no version contains, of the next push of each of these workers, in the order in which
// they came. Pushes of a worker are applied in the order of their clocks; one that comes early waits for those before it.
//
// With a grace a quorum only begins it. The version is made of the next push of every worker whose push has come when the grace ends, or as
// soon as no worker is left whose push has not. The caller has the clock: it says when a grace ends.
class Core {
 public:
  static constexpr int all = 0;

  struct Options {
    int workers = 1;
    int keys = 1;
    int quorum = all;     // or 1 to `workers`
    int64_t window = 64;  // how many pushes of a worker and a key may wait
    bool grace = false;   // not with quorum `all`
  };

  explicit Core(const Options& options);

  // Each event appends what follows from it. The actions are to be done in this order.
  void push(int key, const Contribution& contribution, std::vector<Action>& actions);
  // Its id is free again when it is answered or fails.
  void pull(Pull pull, std::vector<Action>& actions);
  // The worker is lost: its pulls fail, and what it pushed counts only if it has come, and all pushes before it have. With quorum `all`
  // no further version can be made, and pulls that need one fail. Else the others go on, with a quorum of at most those that are left.
  void leave(int worker, std::vector<Action>& actions);
  // The grace of this version is over. It is ignored where the version is made already.
  void elapse(int key, int64_t version, std::vector<Action>& actions);

  int64_t version(int key) const;
  // How many pushes of the worker the key contains.
  int64_t applied(int key, int worker) const;
  // The workers whose pushes a waiting pull lacks, in ascending order.
  std::vector<int> lacking(int64_t pull) const;
  // All that later actions depend on: cores with equal numbers act alike from here on. So a search meets each state once.
  std::vector<int64_t> state() const;

 private:
  // A contribution that waits for those before it, or for a quorum.
  struct Waiting {
    int64_t clock = 0, id = 0;
    int64_t arrival = 0;  // greater than that of all that came before
    int next = -1;        // of the same worker and key, with a later clock; -1: none
  };
  struct Progress {  // of a worker and a key
    int64_t applied = 0;
    int first = -1, last = -1;  // of its waiting contributions; -1: none
  };
  struct Key {
    int64_t version = 0;
    int64_t limit = std::numeric_limits<int64_t>::max();  // the last version that can be made
    int limited_by = -1;                                  // the lost worker whose push the one after it lacks
    int candidates = 0;                                   // the workers whose next push has come
    bool in_grace = false;                                // they are a quorum, and the next version waits for more
    int first_watcher = -1, last_watcher = -1;            // readers that wait for this key
  };
  struct Reader {
    Pull pull;
    bool waits = false;
    std::size_t position = 0;  // in the keys of the pull: it has all of those before
    int worker = 0;            // it has the pushes of all before this one
    int next = -1;             // that watches the same key
  };

  void check_key(int key) const;
  void check_worker(int worker) const;
  std::size_t first_of(int key) const { return static_cast<std::size_t>(key) * options_.workers; }
  Progress& progress(int key, int worker) { return progress_[first_of(key) + worker]; }
  const Progress& progress(int key, int worker) const { return progress_[first_of(key) + worker]; }
  int64_t received(int key, int worker) const;
  int64_t needed(const Pull& pull, int worker) const;
  int64_t counted(const Pull& pull, int key, int worker) const;
  bool is_candidate(int key, int worker) const;
  int find(int64_t pull) const;
  void add_candidate(int key, int worker);
  bool have_all_pushed(int key) const;
  bool make_versions(int key, std::vector<Action>& actions);
  void make_version(int key, std::vector<Action>& actions);
  void wake(int key, std::vector<Action>& actions);
  void advance(int reader, std::vector<Action>& actions);
  void finish(int reader, Action::Kind kind, int worker, std::vector<Action>& actions);
  void drop(int key, int worker, int64_t from, std::vector<Contribution>& dropped);
  int release(int waiting);

  Options options_;
  int quorum_;  // `workers` with quorum `all`
  int64_t arrivals_ = 0;
  std::vector<Progress> progress_;  // of key 0 and all workers, then of key 1
  std::vector<int> candidates_;     // of each key, in the order in which a version has them, in as many places
  std::vector<Key> keys_;
  std::vector<Waiting> waiting_;
  int free_ = -1;  // the first of `waiting_` that is not in use
  std::vector<Reader> readers_;
  std::vector<bool> left_;
};

}  // namespace dltrain::ps
