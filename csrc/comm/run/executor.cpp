#include "comm/run/executor.h"

#include <algorithm>

#include "comm/program/choice.h"
#include "core/check.h"
#include "core/cuda/runtime.h"
#include "kernels/codec.h"

namespace dltrain::comm {

namespace {

constexpr std::chrono::milliseconds measuring_time(50);

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

bool is_captured(const Place& place) {
  if constexpr (built_with_cuda) return cuda::is_capturing(place);
  return false;
}

class UnderWay {
 public:
  explicit UnderWay(std::atomic<bool>& flag) : flag_(flag) { flag_ = true; }
  ~UnderWay() { flag_ = false; }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

 private:
  std::atomic<bool>& flag_;
};

// For what may be messages as well as values: two of its NaNs make one of fp32, in a value or a scale.
Elements as_bytes(void* data) { return {data, Dtype::bf16}; }

int codec_index(const Codec& codec) { return static_cast<int>(&codec - codecs().data()); }

Choice choice(const AllReduce& call, const Codec& codec, int64_t numel, int world_size, const Crossover* crossover = nullptr) {
  const int64_t wire_bytes = call.layout ? message_bytes(*call.layout) : codec.bytes(numel);
  return choose(call.algorithm, call.segments, world_size, numel, codec, wire_bytes, crossover);
}

std::vector<std::vector<Piece>> cut(const AllReduce& call, const Codec& codec, int64_t numel, int world_size, int segments) {
  if (call.layout) return cut_by_region(*call.layout, segments);
  if (call.share.data) return cut_in_shares(numel, world_size, codec, segments);
  return call.owners ? cut_for_owners(numel, call.owners, codec, segments) : cut_evenly(numel, codec, segments);
}

}  // namespace

void check_names(const std::string& algorithm, const std::string& codec) {
  const bool lossy = find_codec(codec).is_lossy();
  std::vector<std::string> names;
  for (const std::string& name : algorithms()) {
    if (!lossy || !make_plan(name, 0, 1).exact) names.push_back(name);
  }
  for (const std::string& name : other_algorithms()) {
    if (!lossy || name != "native") names.push_back(name);
  }
  const std::string argument = lossy ? text("algorithm (for the codec ", codec, ")") : "algorithm";
  if (std::find(names.begin(), names.end(), algorithm) == names.end()) unknown_name(argument.c_str(), names, algorithm);
}

Encoded encoded(const AllReduce& call, int64_t numel, int world_size) {
  const Codec& codec = find_codec(call.codec);
  const auto [algorithm, segments] = choice(call, codec, numel, world_size);
  if (!leaves_final_bytes(algorithm)) return {};
  const int chunks = make_plan(plan_names()[algorithm], 0, world_size).chunks;
  return encoded(chunks, cut(call, codec, numel, world_size, segments));
}

Executor::Executor(std::unique_ptr<Transport> transport, std::vector<int> global_ranks)
    : transport_(std::move(transport)),
      traffic_(transport_->in_groups() ? in_groups(*transport_) : one_by_one(*transport_)),
      global_ranks_(std::move(global_ranks)),
      meeting_(meeting(rank(), world_size())) {}

Executor::~Executor() {
  if (!transport_->in_groups()) return;
  end("the executor was destroyed");
  failure_.drain();
}

void Executor::all_reduce(const Place& place, const Elements& values, int64_t numel, const AllReduce& call) {
  check(numel >= 0, "numel: expected at least 0, got ", numel);
  check(call.segments >= 0, "segments: expected at least 0, got ", call.segments);
  check_open();
  if (numel == 0 && transport_->in_groups()) {  // nobody could tell of a disagreement
    ++calls_;
    return;
  }
  const bool measures = call.measures && call.algorithm == "auto" && world_size() > 1 && !place.on_cuda();
  if (measures && !crossover_) look_for_crossover(place, call.timeout);
  const Codec& codec = find_codec(call.codec);
  const bool is_its_message = !call.layout && !call.share.data && call.codec == "raw" && values.dtype == Dtype::fp32;
  const Result result = call.message ? Result::message : is_its_message ? Result::values_in_place : Result::values;
  const Program& program = this->program(call, codec, numel, result);
  const int64_t number = calls_ + 1;
  transport_->begin(
      {number, numel, program.algorithm, codec_index(codec), program.segments, call.average, call.layout ? digest(*call.layout) : 0});
  Work work = work_of(numel > 0 ? program : meeting_, plan_names()[program.algorithm], call, place, values, numel);
  work.slots = slots(work);
  work.inbox = static_cast<char*>(inbox_.reserve(place, program.inbox));
  work.step = call.step.value_or(static_cast<uint32_t>(number));
  run(work, [&](Deadline deadline) { return traffic_->run(work, deadline); });
  if (place.on_cuda()) {  // a captured graph has memory of its own
    slots_ = {};
    inbox_ = {};
  }
  calls_ = number;
  wire_bytes_ += program.sent;
}

char* Executor::slots(const Work& work) {
  switch (work.program.result) {
    case Result::values_in_place: return static_cast<char*>(work.values.data);
    case Result::message: return work.call.message;
    case Result::values: break;
  }
  return static_cast<char*>(slots_.reserve(work.place, work.program.slots));
}

void Executor::reduce_scatter(const Place& place, const Elements& share, const Elements& values, int64_t numel, AllReduce call) {
  check(numel % world_size() == 0, "numel: expected a multiple of ", world_size(), ", got ", numel);
  call.algorithm = "reduce_scatter";
  call.share = share;
  all_reduce(place, values, numel, call);
}

void Executor::look_for_crossover(const Place& place, std::chrono::milliseconds timeout) {
  const int64_t sent = wire_bytes_;
  const auto sum = [&](const std::string& algorithm, float* values, int64_t numel) {
    AllReduce call;
    call.algorithm = algorithm;
    call.segments = 1;
    call.timeout = timeout;
    all_reduce(place, {values}, numel, call);
  };
  crossover_ = comm::look_for_crossover(world_size(), measuring_time, sum, [] { return Seconds(Clock::now().time_since_epoch()); });
  wire_bytes_ = sent;
}

void Executor::meet(Call call, std::chrono::milliseconds timeout) {
  check_open();
  call.number = calls_ + 1;
  transport_->begin(call);
  AllReduce waits;
  waits.algorithm = "native";
  waits.timeout = timeout;
  const Work work = work_of(meeting_, waits.algorithm, waits, {}, {}, 0);
  run(work, [&](Deadline deadline) { return traffic_->run(work, deadline); });
  calls_ = call.number;
}

void Executor::reduce_scatter(const Place& place, float* values, int64_t numel, int owners, bool average,
                              std::chrono::milliseconds timeout) {
  if (Collectives* const backend = transport_->collectives()) {
    return enqueue("reduce_scatter", place, {values}, numel, timeout,
                   [&] { backend->reduce_scatter(place, values, shares(numel, owners), average); });
  }
  AllReduce half;
  half.algorithm = "reduce_scatter";
  half.owners = owners;
  half.average = average;
  half.segments = 1;
  half.timeout = timeout;
  all_reduce(place, {values}, numel, half);
}

void Executor::all_gather(const Place& place, float* values, int64_t numel, int owners, std::chrono::milliseconds timeout) {
  if (Collectives* const backend = transport_->collectives()) {
    return enqueue("all_gather", place, as_bytes(values), 2 * numel, timeout,
                   [&] { backend->all_gather(place, values, shares(numel, owners)); });
  }
  AllReduce half;
  half.algorithm = "all_gather";
  half.owners = owners;
  half.segments = 1;
  half.timeout = timeout;
  all_reduce(place, {values}, numel, half);
}

void Executor::all_reduce_natively(const Place& place, void* values, int64_t numel, Number number, bool average,
                                   std::chrono::milliseconds timeout) {
  Elements spoilt{nullptr};
  if (number == Number::fp32) spoilt = {values};
  if (number == Number::fp16) spoilt = {values, Dtype::fp16};
  if (number == Number::bf16) spoilt = {values, Dtype::bf16};
  enqueue("native", place, spoilt, numel, timeout, [&] { transport_->collectives()->all_reduce(place, values, numel, number, average); });
}

void Executor::all_reduce_natively(std::chrono::milliseconds timeout, const std::function<void()>& collective) {
  enqueue("native", {}, {nullptr}, 1, timeout, collective);
}

void Executor::enqueue(const std::string& name, const Place& place, const Elements& values, int64_t numel,
                       std::chrono::milliseconds timeout, const std::function<void()>& collective) {
  check_open();
  if (numel > 0) {
    AllReduce call;
    call.timeout = timeout;
    const Work work = work_of(meeting_, name, call, place, values, numel);
    Waiting waiting;
    for (int rank = 0; rank < world_size(); ++rank) {
      if (rank != this->rank()) waiting.peers.push_back(rank);
    }
    traffic_->wait_for(waiting);
    run(work, [&](Deadline) {
      collective();
      std::vector<Stage> stages;
      if (place.on_cuda()) stages.push_back({Event::record(place), waiting});
      return stages;
    });
  }
  ++calls_;
}

std::vector<Span> Executor::shares(int64_t numel, int owners) const {
  std::vector<Span> all;
  for (int rank = 0; rank < world_size(); ++rank) all.push_back(share(numel, owners, rank));
  return all;
}

const Program& Executor::program(const AllReduce& call, const Codec& codec, int64_t numel, Result result) {
  constexpr size_t most = 256;
  const auto [algorithm, segments] = choice(call, codec, numel, world_size(), call.measures && crossover_ ? &*crossover_ : nullptr);
  static const Layout whole;
  const Layout& layout = call.layout ? *call.layout : whole;
  const auto key = std::make_tuple(algorithm, codec_index(codec), numel, segments, result, call.owners);
  if (const auto found = programs_.find(std::tie(key, layout)); found != programs_.end()) return found->second;
  const Plan plan = make_plan(plan_names()[algorithm], rank(), world_size());
  if (programs_.size() == most) programs_.clear();
  return programs_[{key, layout}] = lower(plan, cut(call, codec, numel, world_size(), segments), result);
}

Work Executor::work_of(const Program& program, const std::string& algorithm, const AllReduce& call, const Place& place,
                       const Elements& values, int64_t numel) {
  Work work{program, algorithm, call, rank(), world_size(), place, values, numel};
  work.lists = &lists_;
  return work;
}

void Executor::check_open() const {
  if (const std::string reason = failure(); !reason.empty()) throw AllReduceError(reason);
}

// enqueue: returns when all is done or, on a device, the stages. There it may have to wait for peers, so the watch looks after it, too.
template <class Enqueue>
void Executor::run(const Work& work, Enqueue enqueue) {
  const auto start = Clock::now();
  const Deadline deadline = start + work.call.timeout;
  const UnderWay under_way(under_way_);
  std::optional<int64_t> watched;
  try {
    if (work.place.on_cuda()) watched = watch_.begin({work.place.device, deadline, giving_up(work, start)});
    std::vector<Stage> stages = enqueue(deadline);
    if (!stages.empty()) spoil(work);
    if (!stages.empty() && is_captured(work.place)) {  // its events never pass
      failure_.captured();
      stages.clear();
    }
    if (watched) watch_.enqueued(*watched, std::move(stages));
  } catch (const std::exception& error) {
    if (watched) watch_.enqueued(*watched, {});
    fail(work, traffic_->waiting(), error, Clock::now() - start);
  }
}

// What is not to be taken for a result, if this fails.
void Executor::spoil(const Work& work) {
  if (work.call.message) {
    failure_.spoil(work.place, as_bytes(work.call.message), work.program.slots / 2);
  } else if (work.call.share.data) {
    failure_.spoil(work.place, work.call.share, work.numel / world_size());
  } else if (work.values.data) {
    failure_.spoil(work.place, work.values, work.numel);
  }
}

std::function<void(const Waiting*, const std::string&)> Executor::giving_up(const Work& work, Clock::time_point start) {
  return [this, start, algorithm = work.algorithm, timeout = work.call.timeout, rounds = work.program.rounds](const Waiting* enqueued,
                                                                                                              const std::string& why) {
    const Waiting waiting = enqueued ? *enqueued : traffic_->waiting();
    const auto after = Clock::now() - start;
    const std::string finding = find_culprit(waiting);
    abort(describe(algorithm, waiting, rounds, after, timeout, finding.empty() ? why : text(why, "; ", finding)));
  };
}

std::string Executor::find_culprit(const Waiting& waiting, const std::exception* error) {
  if (!lookout_ || failure_.is_set()) return {};
  const Waiting by_name = in_the_world(waiting);
  if (dynamic_cast<const Disagreement*>(error)) return lookout_->declare(Verdict::Manner::disagreement, by_name);
  if (error && !dynamic_cast<const TransportError*>(error)) return lookout_->declare(Verdict::Manner::failure, by_name);
  return lookout_->explain(by_name);
}

// Whatever it was, messages are out of step from now on.
void Executor::fail(const Work& work, const Waiting& waiting, const std::exception& error, Clock::duration after) {
  broken_ = true;
  const std::string finding = find_culprit(waiting, &error);  // before this rank closes: the others shall not take it for the culprit
  {
    std::lock_guard lock(closing_);
    if (!failure_.is_set()) failure_.set(describe_failure(work, waiting, error, after, finding));
  }
  if (transport_->in_groups()) transport_->abort();
  close();  // while sends are under way still: they are ahead of what it tells
  traffic_->forget();
  throw AllReduceError(failure());
}

std::string Executor::describe_failure(const Work& work, const Waiting& waiting, const std::exception& error, Clock::duration after,
                                       const std::string& finding) const {
  std::string what = error.what();
  const bool named = dynamic_cast<const Disagreement*>(&error) || dynamic_cast<const Farewell*>(&error);  // what the peer does is said
  for (int peer = 0; peer < world_size() && !named; ++peer) {
    const std::string words = peer == rank() ? "" : transport_->last_words(peer);
    if (!words.empty()) what += text("; rank ", global(peer), ": ", words);
  }
  if (!finding.empty()) what += "; " + finding;
  return describe(work.algorithm, waiting, work.program.rounds, after, work.call.timeout, what);
}

std::string Executor::describe(const std::string& algorithm, const Waiting& waiting, int rounds, Clock::duration after,
                               Clock::duration timeout, const std::string& what) const {
  std::string peers = waiting.peers.size() > 1 ? "one of the ranks " : "rank ";
  for (const int& peer : waiting.peers) peers += text(&peer == waiting.peers.data() ? "" : ", ", global(peer));
  return text("all_reduce with ", algorithm, " on rank ", global(rank()), " in a group of ", world_size(), ": waiting for ", peers,
              " in round ", waiting.round, " of ", rounds, " failed after ", seconds(after), " s (deadline ", seconds(timeout),
              " s): ", what);
}

// The reason comes first: what then comes to its end on a device must find it.
void Executor::abort(const std::string& reason) {
  broken_ = true;
  failure_.set(reason);
  traffic_->abort();
  transport_->abort();
}

void Executor::end(const std::string& reason) {
  constexpr auto moment = std::chrono::milliseconds(50);  // in which it is seen that what is done is done
  if (!transport_->in_groups() || broken_ || !watch_.is_over(moment)) return abort(reason);
  failure_.set(reason);
  close();
}

void Executor::give_up(const std::string& finding) {
  broken_ = true;
  failure_.set_for_now(text("all_reduce on rank ", global(rank()), " in a group of ", world_size(), ": ", finding));
  traffic_->abort();
  transport_->abort();
}

Waiting Executor::waiting() { return in_the_world(under_way_ ? traffic_->waiting() : watch_.waiting()); }

Waiting Executor::in_the_world(Waiting waiting) const {
  for (int& peer : waiting.peers) peer = global(peer);
  return waiting;
}

void Executor::close() noexcept {
  std::lock_guard lock(closing_);
  transport_->close();
}

}  // namespace dltrain::comm
