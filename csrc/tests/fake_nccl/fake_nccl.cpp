// An NCCL for machines without GPUs: ranks are threads of one process, and data is on the host or on the emulated device. It is as strict
// as NCCL: a send ends when it is received, a group when all its messages have ended, and later work follows it; the first messages between
// two ranks block both until both have called; an abort is not reported to other ranks. What NCCL leaves undefined, like two threads in one
// communicator, is refused.

#include "tests/fake_nccl/fake_nccl.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "comm/transport/nccl/api.h"
#include "core/check.h"
#include "core/dtype.h"
#ifdef DLTRAIN_CUDA
#include <cuda_runtime.h>
#endif

using namespace dltrain::comm::nccl;
using dltrain::text;

#define DLT_EXPORTED extern "C" __attribute__((visibility("default")))

#define DLT_NCCL(theirs, ours, ...) DLT_EXPORTED std::type_identity_t<__VA_ARGS__> theirs;
DLT_NCCL_FUNCTIONS(DLT_NCCL)
#undef DLT_NCCL

namespace {

constexpr Result invalid_argument = 4, invalid_usage = 5;
constexpr int good_version = 22809;

enum class Kind { send, recv, all_reduce, reduce, broadcast, reduce_scatter, all_gather };

struct Operation {
  Kind kind;
  const void* from;
  void* to;
  size_t count;
  DataType type;
  RedOp op;
  int peer;  // or root
};

// The operations of a group. On a stream they are launched later.
struct Launch {
  std::shared_ptr<ncclComm> comm;
  CUstream_st* stream;
  std::vector<Operation> operations;
  size_t left;  // operations that are not done
};

struct Posted {
  std::shared_ptr<Launch> launch;
  Operation operation;
  std::shared_ptr<std::vector<char>> buffer;  // contains the bytes of a send; null if the send waits for its receive
};

struct Channel {  // from one rank to another
  std::deque<Posted> sends, receives;
};

using Rendezvous = std::vector<std::optional<Posted>>;  // the operation of each rank in a collective

struct Ends {  // whether the ranks have called for the first message from one rank to another
  bool sender = false, receiver = false;
};

struct Clique {
  explicit Clique(int size)
      : came(size), in_collective(size), connects(size, std::vector<Ends>(size)), channels(size, std::vector<Channel>(size)) {}
  std::vector<bool> came;                      // ranks that have joined
  std::vector<bool> in_collective;             // ranks that have called their first collective
  std::vector<std::vector<Ends>> connects;     // [from][to]
  std::vector<std::vector<Channel>> channels;  // [from][to]
  std::map<int64_t, Rendezvous> rendezvous;    // by their number

  int size() const { return static_cast<int>(came.size()); }
  bool is_complete() const { return std::find(came.begin(), came.end(), false) == came.end(); }
};

struct Wish {
  std::string function;
  int rank, left;
  Result result;
};

}  // namespace

struct ncclComm {
  ncclComm(int rank, std::shared_ptr<Clique> clique) : rank(rank), clique(std::move(clique)) {}

  int rank;
  std::shared_ptr<Clique> clique;
  bool aborted = false, finalized = false;
  Result error = success;
  std::optional<CUstream_st*> stream;  // of all launches
  bool busy = false;                   // a thread is in it
  int64_t collectives = 0;
  int enqueued = 0;  // launches that are not done on their stream

  // Whether buffered messages are not yet received.
  bool has_unsent() const {
    const auto& sent = clique->channels[rank];
    return std::any_of(sent.begin(), sent.end(), [](const Channel& channel) { return !channel.sends.empty(); });
  }
};

namespace {

std::mutex mutex;  // guards all data that is not of one thread, and the copies of messages
std::condition_variable changed;

std::map<std::string, std::weak_ptr<Clique>> cliques;  // by their unique ids
std::map<ncclComm*, std::shared_ptr<ncclComm>> comms;
int ids = 0;
const char* last_error = "";

std::vector<std::string> calls;
std::vector<Wish> wishes;
std::vector<int> held_back;
int version = good_version, resets = 0;
bool tells_of_aborts = false, buffers_sends = false, graph_lives = false;

struct Group {
  int depth = 0;
  Result error = success;
  int rank = -1;
  std::shared_ptr<ncclComm> comm;
  std::optional<CUstream_st*> stream;
  std::vector<Operation> operations;
};
thread_local Group group;

Result refuse(Result result, const char* why) {
  last_error = why;
  return result;
}

Result note(const char* function, int rank, const std::string& details = "") {
  calls.push_back(text("rank ", rank, ": ", function, details));
  for (auto wish = wishes.begin(); wish != wishes.end(); ++wish) {
    if (wish->function != function || (wish->rank >= 0 && wish->rank != rank) || --wish->left > 0) continue;
    const Result result = wish->result;
    wishes.erase(wish);
    return refuse(result, "as the test wishes");
  }
  return success;
}

std::shared_ptr<ncclComm> find(Comm comm) {
  const auto found = comms.find(comm);
  return found == comms.end() ? nullptr : found->second;
}

size_t size_of(DataType type) {
  switch (type) {
    case int8:
    case uint8: return 1;
    case fp16:
    case bf16: return 2;
    case int32:
    case fp32: return 4;
    case int64:
    case fp64: return 8;
    default: return 0;
  }
}

// Calls visit(element) with an element of the type.
template <class Visit>
void with_type(DataType type, Visit visit) {
  switch (type) {
    case int8: return visit(int8_t{});
    case uint8: return visit(uint8_t{});
    case int32: return visit(int32_t{});
    case int64: return visit(int64_t{});
    case fp16: return visit(dltrain::Half{});
    case bf16: return visit(dltrain::BFloat16{});
    case fp32: return visit(float{});
    case fp64: return visit(double{});
    default: return;
  }
}

template <class T>
auto wide(T x) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<int64_t>(x);
  } else if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return dltrain::widen(x);
  }
}

template <class T, class Wide>
T narrow(Wide x) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(x);
  } else {
    return dltrain::narrow<T>(x);
  }
}

void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

// Reduces the inputs of all ranks in their order.
std::vector<char> sum_of(const Rendezvous& parts, size_t count) {
  const Operation& first = parts[0]->operation;
  std::vector<char> out(count * size_of(first.type));
  with_type(first.type, [&](auto element) {
    using T = decltype(element);
    for (size_t i = 0; i < count; ++i) {
      auto sum = wide(static_cast<const T*>(first.from)[i]);
      for (size_t rank = 1; rank < parts.size(); ++rank) sum += wide(static_cast<const T*>(parts[rank]->operation.from)[i]);
      if (first.op == avg) sum /= static_cast<decltype(sum)>(parts.size());
      const T element_out = narrow<T>(sum);
      std::memcpy(out.data() + i * sizeof(T), &element_out, sizeof(T));
    }
  });
  return out;
}

void finish(const Posted& posted) {
  if (--posted.launch->left == 0) changed.notify_all();
}

// All inputs are read before anything is written, because the operation may be in place.
void carry_out(const Rendezvous& parts) {
  const Operation& first = parts[0]->operation;
  const size_t bytes = first.count * size_of(first.type);
  std::vector<char> result;
  switch (first.kind) {
    case Kind::broadcast: {
      const char* const from = static_cast<const char*>(parts[first.peer]->operation.from);
      result.assign(from, from + bytes);
      break;
    }
    case Kind::all_gather:
      for (const auto& part : parts) {
        const char* const from = static_cast<const char*>(part->operation.from);
        result.insert(result.end(), from, from + bytes);
      }
      break;
    case Kind::reduce_scatter: result = sum_of(parts, first.count * parts.size()); break;
    default: result = sum_of(parts, first.count);
  }
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    void* const to = parts[rank]->operation.to;
    if (first.kind == Kind::reduce_scatter) {
      copy(to, result.data() + rank * bytes, bytes);
    } else if (first.kind != Kind::reduce || static_cast<int>(rank) == first.peer) {
      copy(to, result.data(), result.size());
    }
  }
  for (const auto& part : parts) finish(*part);
}

void poison(const Posted& posted, const char* why) {
  posted.launch->comm->error = refuse(internal_error, why);
  changed.notify_all();
}

void match(Channel& channel) {
  while (!channel.sends.empty() && !channel.receives.empty()) {
    const Posted send = std::move(channel.sends.front()), receive = std::move(channel.receives.front());
    channel.sends.pop_front();
    channel.receives.pop_front();
    const Operation &from = send.operation, &to = receive.operation;
    const size_t bytes = from.count * size_of(from.type);
    if (bytes == to.count * size_of(to.type)) {
      copy(to.to, send.buffer ? send.buffer->data() : from.from, bytes);
      if (!send.buffer) finish(send);
      finish(receive);
      changed.notify_all();
    } else {  // neither of them ever ends
      poison(send, "a send and its receive differ in size");
      poison(receive, "a send and its receive differ in size");
    }
  }
}

void join_collective(const Posted& posted) {
  ncclComm& comm = *posted.launch->comm;
  const auto entry = comm.clique->rendezvous.try_emplace(comm.collectives++, comm.clique->size()).first;
  Rendezvous& parts = entry->second;
  parts[comm.rank] = posted;
  if (std::find(parts.begin(), parts.end(), std::nullopt) != parts.end()) return;
  const Rendezvous complete = std::move(parts);
  comm.clique->rendezvous.erase(entry);
  const Operation& first = complete[0]->operation;
  const bool agree = std::all_of(complete.begin(), complete.end(), [&](const auto& part) {
    const Operation& each = part->operation;
    return each.kind == first.kind && each.count == first.count && each.type == first.type && each.op == first.op &&
           each.peer == first.peer;
  });
  if (agree) return carry_out(complete);
  for (const auto& part : complete) poison(*part, "the ranks differ in what they do together");
}

void post(const std::shared_ptr<Launch>& launch) {
  ncclComm& comm = *launch->comm;
  for (const Operation& operation : launch->operations) {
    Posted posted{launch, operation, nullptr};
    if (operation.kind != Kind::send && operation.kind != Kind::recv) {
      join_collective(posted);
      continue;
    }
    auto& channels = comm.clique->channels;
    const bool sent = operation.kind == Kind::send;
    Channel& channel = sent ? channels[comm.rank][operation.peer] : channels[operation.peer][comm.rank];
    if (sent && buffers_sends) {
      const char* const bytes = static_cast<const char*>(operation.from);
      posted.buffer = std::make_shared<std::vector<char>>(bytes, bytes + operation.count * size_of(operation.type));
      finish(posted);
    }
    (sent ? channel.sends : channel.receives).push_back(posted);
    match(channel);
  }
}

#ifdef DLTRAIN_CUDA
constexpr bool takes_streams = true;

// Returns when the group is done, so that later work of the stream follows it.
void run(const std::shared_ptr<Launch>& launch) {
  std::unique_lock lock(mutex);
  if (!launch->comm->aborted) post(launch);
  changed.wait(lock, [&] { return launch->comm->aborted || launch->left == 0; });
}

void enqueue(const std::shared_ptr<Launch>& launch) {
  if (launch->stream->capture) {  // each replay is a launch of its own
    return launch->stream->give([comm = launch->comm, stream = launch->stream, operations = launch->operations] {
      run(std::make_shared<Launch>(Launch{comm, stream, operations, operations.size()}));
    });
  }
  ++launch->comm->enqueued;
  launch->stream->queue.submit([launch] {
    run(launch);
    const std::lock_guard lock(mutex);
    --launch->comm->enqueued;
    changed.notify_all();
  });
}
#else
constexpr bool takes_streams = false;
void enqueue(const std::shared_ptr<Launch>&) {}
#endif

// Blocks the calling thread until `done`, or until the wait is ended by an abort, an error or a reset.
template <class Done>
Result wait(std::unique_lock<std::mutex>& lock, ncclComm& comm, Done done) {
  comm.busy = true;
  changed.wait(lock, [&, before = resets] { return done() || comm.aborted || comm.error != success || resets != before; });
  comm.busy = false;
  if (comm.error != success) return comm.error;
  return done() ? success : refuse(remote_error, "nobody waits any more");
}

Result connect(std::unique_lock<std::mutex>& lock, const Launch& launch) {
  ncclComm& comm = *launch.comm;
  Clique& clique = *comm.clique;
  for (const Operation& operation : launch.operations) {
    if (operation.kind == Kind::send) {
      clique.connects[comm.rank][operation.peer].sender = true;
    } else if (operation.kind == Kind::recv) {
      clique.connects[operation.peer][comm.rank].receiver = true;
    } else {
      clique.in_collective[comm.rank] = true;
    }
  }
  changed.notify_all();
  return wait(lock, comm, [&] {
    return std::all_of(launch.operations.begin(), launch.operations.end(), [&](const Operation& operation) {
      if (operation.kind == Kind::send) return clique.connects[comm.rank][operation.peer].receiver;
      if (operation.kind == Kind::recv) return clique.connects[operation.peer][comm.rank].sender;
      return std::find(clique.in_collective.begin(), clique.in_collective.end(), false) == clique.in_collective.end();
    });
  });
}

Result end_group(std::unique_lock<std::mutex>& lock) {
  const Group ended = std::exchange(group, {});
  if (ended.error != success || ended.operations.empty()) return ended.error;
  const auto launch = std::make_shared<Launch>(Launch{ended.comm, *ended.stream, ended.operations, ended.operations.size()});
  if (!launch->stream) {
    post(launch);
    return wait(lock, *launch->comm, [&] { return launch->left == 0; });
  }
  const Result result = connect(lock, *launch);
  if (result == success) enqueue(launch);
  return result;
}

Result check_operation(const ncclComm& comm, const Operation& operation, CUstream_st* stream) {
  const bool is_message = operation.kind == Kind::send || operation.kind == Kind::recv;
  if (comm.error != success) return comm.error;
  if (comm.busy) return refuse(invalid_usage, "another thread is in the communicator");
  if (size_of(operation.type) == 0) return refuse(invalid_argument, "no such type");
  if (operation.peer < 0 || operation.peer >= comm.clique->size()) return refuse(invalid_argument, "no such rank");
  if (!is_message && operation.op != sum && operation.op != avg) return refuse(invalid_argument, "no such reduction");
  if (stream && !takes_streams) return refuse(invalid_usage, "this build has no streams");
  if (comm.stream.value_or(stream) != stream) return refuse(invalid_usage, "expected all of a communicator on one stream");
  if (group.comm && group.comm.get() != &comm) return refuse(invalid_usage, "expected a group of one communicator");
  return success;
}

Result give(const char* function, Comm handle, CUstream_st* stream, const Operation& operation) {
  std::unique_lock lock(mutex);
  const auto comm = find(handle);
  const bool alone = group.depth == 0;
  const std::string details = text(" peer ", operation.peer, " bytes ", operation.count * size_of(operation.type));
  group.rank = comm ? comm->rank : -1;
  Result result = note(function, group.rank, details);
  if (result == success && !comm) result = refuse(invalid_argument, "no such communicator");
  if (result == success) result = check_operation(*comm, operation, stream);
  if (result == success) {
    group.comm = comm;
    group.stream = comm->stream = stream;
    group.operations.push_back(operation);
  } else {
    group.error = result;
  }
  return alone ? end_group(lock) : result;
}

void abort(ncclComm& comm) {
  comm.aborted = true;
  Clique& clique = *comm.clique;
  for (int peer = 0; peer < clique.size(); ++peer) {
    clique.channels[comm.rank][peer].sends.clear();
    clique.channels[peer][comm.rank].receives.clear();
  }
  for (auto& [number, parts] : clique.rendezvous) parts[comm.rank].reset();
  for (auto& [handle, other] : comms) {
    if (tells_of_aborts && other->clique == comm.clique && handle != &comm) other->error = refuse(remote_error, "a rank has aborted");
  }
  changed.notify_all();
}

}  // namespace

Result ncclGetVersion(int* out) {
  const std::lock_guard lock(mutex);
  *out = version;
  return note("ncclGetVersion", -1);
}

const char* ncclGetErrorString(Result result) {
  constexpr const char* texts[] = {"no error",
                                   "unhandled cuda error",
                                   "unhandled system error",
                                   "internal error",
                                   "invalid argument",
                                   "invalid usage",
                                   "remote process exited or there was a network error",
                                   "NCCL operation in progress"};
  return result >= 0 && result < static_cast<int>(std::size(texts)) ? texts[result] : "unknown result code";
}

const char* ncclGetLastError(Comm) {
  const std::lock_guard lock(mutex);
  return last_error;
}

Result ncclGetUniqueId(UniqueId* id) {
  const std::lock_guard lock(mutex);
  const std::string name = text("clique ", ids++);
  std::fill(std::begin(id->bytes), std::end(id->bytes), '\0');
  std::copy(name.begin(), name.end(), id->bytes);
  cliques[{id->bytes, sizeof(id->bytes)}];
  return note("ncclGetUniqueId", -1);
}

Result ncclCommInitRankConfig(Comm* out, int ranks, UniqueId id, int rank, Config* config) {
  std::unique_lock lock(mutex);
  *out = nullptr;
  const Result result =
      note("ncclCommInitRankConfig", rank, text(" ranks ", ranks, " size ", config->size, " blocking ", config->blocking));
  if (result != success) return result;
  // The struct of NCCL 2.14. With other ones, which NCCL also accepts, each group would have a thread of its own.
  if (config->size != 24 || config->magic != 0xcafebeef || config->version < 21400 || config->blocking != 1) {
    return refuse(invalid_argument, "a configuration of another kind");
  }
  const auto found = cliques.find({id.bytes, sizeof(id.bytes)});
  if (found == cliques.end()) return refuse(invalid_argument, "no such unique id");
  auto clique = found->second.lock();
  if (!clique && ranks > 0) found->second = clique = std::make_shared<Clique>(ranks);
  if (!clique || clique->size() != ranks) return refuse(invalid_argument, "the ranks differ in how many they are");
  if (rank < 0 || rank >= ranks || clique->came[rank]) return refuse(invalid_argument, "no such rank, or it is here already");
  const auto comm = std::make_shared<ncclComm>(rank, clique);
  comms[comm.get()] = comm;
  const auto may_come = [rank] { return std::find(held_back.begin(), held_back.end(), rank) == held_back.end(); };
  Result ended = wait(lock, *comm, may_come);
  if (ended == success) {
    clique->came[rank] = true;
    changed.notify_all();
    ended = wait(lock, *comm, [&] { return clique->is_complete(); });
  }
  if (ended == success) {
    *out = comm.get();
  } else {
    comms.erase(comm.get());
  }
  return ended;
}

Result ncclCommGetAsyncError(Comm handle, Result* out) {
  const std::lock_guard lock(mutex);
  const auto comm = find(handle);
  const Result result = note("ncclCommGetAsyncError", comm ? comm->rank : -1);
  if (result != success) return result;
  if (!comm) return refuse(invalid_argument, "no such communicator");
  *out = comm->error;
  return success;
}

Result ncclCommFinalize(Comm handle) {
  std::unique_lock lock(mutex);
  const auto comm = find(handle);
  const Result result = note("ncclCommFinalize", comm ? comm->rank : -1);
  if (result != success) return result;
  if (!comm || comm->finalized) return refuse(invalid_argument, "no such communicator, or it was finalized before");
  comm->finalized = true;
  return wait(lock, *comm, [&] { return comm->enqueued == 0 && !comm->has_unsent(); });
}

Result ncclCommDestroy(Comm handle) {
  std::unique_lock lock(mutex);
  const auto comm = find(handle);
  const Result result = note("ncclCommDestroy", comm ? comm->rank : -1);
  if (result != success) return result;
  if (!comm || !comm->finalized || comm->error != success) return refuse(invalid_usage, "expected one that was finalized");
  changed.wait(lock, [] { return !graph_lives; });
  comms.erase(handle);
  return success;
}

Result ncclCommAbort(Comm handle) {
  std::unique_lock lock(mutex);
  const auto comm = find(handle);
  const Result result = note("ncclCommAbort", comm ? comm->rank : -1);
  if (result != success) return result;
  if (!comm) return refuse(invalid_argument, "no such communicator");
  abort(*comm);
  changed.wait(lock, [] { return !graph_lives; });
  comms.erase(handle);
  return success;
}

Result ncclGroupStart() {
  const std::lock_guard lock(mutex);
  const Result result = note("ncclGroupStart", -1);
  if (result == success) ++group.depth;
  return result;
}

Result ncclGroupEnd() {
  std::unique_lock lock(mutex);
  const Result result = note("ncclGroupEnd", group.rank, text(" operations ", group.operations.size()));
  if (group.depth == 0) return refuse(invalid_usage, "no group was begun");
  if (--group.depth > 0) return result;
  if (result != success) group.error = result;
  return end_group(lock);
}

Result ncclSend(const void* from, size_t count, DataType type, int peer, Comm comm, CUstream_st* stream) {
  return give("ncclSend", comm, stream, {Kind::send, from, nullptr, count, type, sum, peer});
}

Result ncclRecv(void* to, size_t count, DataType type, int peer, Comm comm, CUstream_st* stream) {
  return give("ncclRecv", comm, stream, {Kind::recv, nullptr, to, count, type, sum, peer});
}

Result ncclAllReduce(const void* from, void* to, size_t count, DataType type, RedOp op, Comm comm, CUstream_st* stream) {
  return give("ncclAllReduce", comm, stream, {Kind::all_reduce, from, to, count, type, op, 0});
}

Result ncclReduce(const void* from, void* to, size_t count, DataType type, RedOp op, int root, Comm comm, CUstream_st* stream) {
  return give("ncclReduce", comm, stream, {Kind::reduce, from, to, count, type, op, root});
}

Result ncclBroadcast(const void* from, void* to, size_t count, DataType type, int root, Comm comm, CUstream_st* stream) {
  return give("ncclBroadcast", comm, stream, {Kind::broadcast, from, to, count, type, sum, root});
}

Result ncclReduceScatter(const void* from, void* to, size_t count, DataType type, RedOp op, Comm comm, CUstream_st* stream) {
  return give("ncclReduceScatter", comm, stream, {Kind::reduce_scatter, from, to, count, type, op, 0});
}

Result ncclAllGather(const void* from, void* to, size_t count, DataType type, Comm comm, CUstream_st* stream) {
  return give("ncclAllGather", comm, stream, {Kind::all_gather, from, to, count, type, sum, 0});
}

DLT_EXPORTED const dltrain::fake_nccl::Controls* fake_nccl_controls() {
  static constexpr dltrain::fake_nccl::Controls controls = {
      .reset =
          [] {
            const std::lock_guard lock(mutex);
            calls.clear();
            wishes.clear();
            held_back.clear();
            last_error = "";
            version = good_version;
            ++resets;
            tells_of_aborts = buffers_sends = graph_lives = false;
            changed.notify_all();
          },
      .calls =
          [] {
            const std::lock_guard lock(mutex);
            return calls;
          },
      .open =
          [] {
            const std::lock_guard lock(mutex);
            return static_cast<int>(comms.size());
          },
      .takes_streams = [] { return takes_streams; },
      .set_version =
          [](int wish) {
            const std::lock_guard lock(mutex);
            version = wish;
          },
      .fail =
          [](const char* function, int rank, int n, int result) {
            const std::lock_guard lock(mutex);
            wishes.push_back({function, rank, n, result});
          },
      .set_error =
          [](int rank, int result) {
            const std::lock_guard lock(mutex);
            return static_cast<int>(std::count_if(comms.begin(), comms.end(), [&](const auto& each) {
              const bool meant = each.second->rank == rank;
              if (meant) each.second->error = refuse(result, "as the test wishes");
              changed.notify_all();
              return meant;
            }));
          },
      .hold_back =
          [](int rank) {
            const std::lock_guard lock(mutex);
            held_back.push_back(rank);
          },
      .let_go =
          [] {
            const std::lock_guard lock(mutex);
            held_back.clear();
            changed.notify_all();
          },
      .tell_of_aborts =
          [] {
            const std::lock_guard lock(mutex);
            tells_of_aborts = true;
          },
      .buffer_sends =
          [] {
            const std::lock_guard lock(mutex);
            buffers_sends = true;
          },
      .let_a_graph_live =
          [](bool lives) {
            const std::lock_guard lock(mutex);
            graph_lives = lives;
            changed.notify_all();
          },
  };
  return &controls;
}
