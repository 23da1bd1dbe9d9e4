#include "comm/run/executor.h"

#include <algorithm>

#include "comm/program/selection.h"
#include "core/check.h"
#include "core/cuda/runtime.h"
#include "core/digest.h"
#include "kernels/codec.h"

namespace dltrain::comm {

namespace {

constexpr std::chrono::milliseconds measuring_time(50);

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

bool is_captured(const ExecutionContext& context) {
  if constexpr (built_with_cuda) return cuda::is_capturing(context);
  return false;
}

class BusyFlag {
 public:
  explicit BusyFlag(std::atomic<bool>& flag) : flag_(flag) { flag_ = true; }
  ~BusyFlag() { flag_ = false; }
  BusyFlag(const BusyFlag&) = delete;
  BusyFlag& operator=(const BusyFlag&) = delete;

 private:
  std::atomic<bool>& flag_;
};

// The beginning of error messages, e.g. "reduce_scatter with direct".
std::string call_name(const Invocation& work) {
  return text(work.call.is_half ? "all_reduce in two levels, " : "", name(work.call.collective), " with ", work.algorithm);
}

// For memory that may hold messages or values: two bf16 NaNs make one fp32 NaN, in a value or in a scale.
TypedPointer as_bytes(void* data) { return {data, Dtype::bf16}; }

int codec_index(const Codec& codec) { return static_cast<int>(&codec - codecs().data()); }

const std::string native = "native";

Selection selection_of(const CallOptions& call, const Codec& codec, int64_t numel, int world_size, const Crossover* crossover = nullptr,
                       int64_t segment_bytes = 0) {
  const int64_t wire_bytes = call.layout ? message_bytes(*call.layout) : codec.bytes(numel);
  return select(call.collective, call.algorithm, call.segments, world_size, numel, codec, wire_bytes, crossover, segment_bytes);
}

std::vector<std::vector<Piece>> cut(const CallOptions& call, const Codec& codec, int64_t numel, int segments) {
  if (call.layout) return cut_by_region(*call.layout, segments);
  return has_owners(call.collective) ? cut_in_shards(call.shards, codec, segments) : cut_evenly(numel, codec, segments);
}

// A digest of what ranks have to agree on in addition to the other members of Call.
int64_t digest_of(const CallOptions& call) {
  if (call.layout && call.agreement) return static_cast<int64_t>(dltrain::digest({digest(*call.layout), call.agreement}) | 1);
  if (call.layout) return digest(*call.layout);
  if (call.agreement) return call.agreement;
  const auto differs = [&](const Span& shard) { return shard.count != call.shards.front().count; };
  return std::any_of(call.shards.begin(), call.shards.end(), differs) ? digest(call.shards) : 0;
}

}  // namespace

void check_names(Collective collective, const std::string& algorithm, const std::string& codec) {
  const bool lossy = find_codec(codec).is_lossy();
  std::vector<std::string> names;
  for (const std::string& name : algorithms(collective)) {
    if (!lossy || !make_plan(collective, name, 0, 1).exact) names.push_back(name);
  }
  for (const std::string& name : other_algorithms()) {
    if (name == "auto" || (collective == Collective::all_reduce && !(lossy && name == native))) names.push_back(name);
  }
  const std::string argument = lossy ? text("algorithm (for the codec ", codec, ")") : "algorithm";
  if (std::find(names.begin(), names.end(), algorithm) == names.end()) unknown_name(argument.c_str(), names, algorithm);
}

Encoded encoded(const CallOptions& call, int64_t numel, int world_size) {
  const Codec& codec = find_codec(call.codec);
  const auto [algorithm, segments] = selection_of(call, codec, numel, world_size);
  if (!leaves_final_bytes(algorithm)) return {};
  const int chunks = make_plan(call.collective, algorithm_of(algorithm), 0, world_size).chunks;
  return encoded(chunks, cut(call, codec, numel, segments));
}

Executor::Executor(std::unique_ptr<Transport> transport, std::vector<int> global_ranks)
    : transport_(std::move(transport)),
      schedule_(enqueues() ? grouped_schedule(*transport_) : eager_schedule(*transport_)),
      global_ranks_(std::move(global_ranks)),
      handshake_(handshake_program(rank(), world_size())) {}

Executor::~Executor() {
  if (!enqueues()) return;
  end("the executor was destroyed");
  failure_.drain();
}

void Executor::run(const ExecutionContext& context, const TypedPointer& values, int64_t numel, const CallOptions& call) {
  check(numel >= 0, "numel: expected at least 0, got ", numel);
  if (has_owners(call.collective) && call.shards.empty() && !call.layout) {
    check(numel % world_size() == 0, "numel: expected a multiple of ", world_size(), ", got ", numel);
    CallOptions equal = call;
    equal.shards = equal_shards(numel, world_size());
    return run(context, values, numel, equal);
  }
  check(call.segments >= 0, "segments: expected at least 0, got ", call.segments);
  check_open();
  if (numel == 0 && enqueues()) {  // without frames no rank could detect a disagreement
    ++calls_;
    return;
  }
  const bool has_times = call.collective == Collective::all_reduce && call.algorithm == "auto";
  const bool measures = call.measures && has_times && world_size() > 1 && !context.on_cuda();
  if (measures && !crossover_) look_for_crossover(context, call.timeout);
  const Codec& codec = find_codec(call.codec);
  const bool is_its_message = !call.layout && !call.shard.data && call.codec == "raw" && values.dtype == Dtype::fp32;
  const Result result = call.message ? Result::message : is_its_message ? Result::values_in_place : Result::values;
  const Program& program = this->program(call, codec, numel, result);
  const int64_t number = calls_ + 1;
  Call identity{number,
                numel,
                static_cast<int16_t>(program.algorithm),
                static_cast<int16_t>(codec_index(codec)),
                program.segments,
                call.average,
                call.root,
                digest_of(call)};
  call.type.copy(identity.type.data(), identity.type.size() - 1);
  begin(identity);
  Invocation work = invocation_of(numel > 0 ? program : handshake_, algorithm_of(program.algorithm), call, context, values, numel);
  work.slots = slots(work);
  work.receive_buffer = static_cast<char*>(receive_buffer_.reserve(context, program.receive_buffer));
  work.step = call.step.value_or(static_cast<uint32_t>(number));
  supervise(work, [&](Deadline deadline) { return schedule_->run(work, deadline); });
  if (context.on_cuda()) {  // not kept, because memory that is allocated during a capture belongs to the graph
    slots_ = {};
    receive_buffer_ = {};
  }
  calls_ = number;
  wire_bytes_ += program.sent;
}

char* Executor::slots(const Invocation& work) {
  switch (work.program.result) {
    case Result::values_in_place: return static_cast<char*>(work.values.data);
    case Result::message: return work.call.message;
    case Result::values: break;
  }
  return static_cast<char*>(slots_.reserve(work.context, work.program.slots));
}

void Executor::look_for_crossover(const ExecutionContext& context, std::chrono::milliseconds timeout) {
  const int64_t sent = wire_bytes_;
  const auto sum = [&](const std::string& algorithm, float* values, int64_t numel) {
    CallOptions call;
    call.algorithm = algorithm;
    call.timeout = timeout;
    run(context, {values}, numel, call);
  };
  crossover_ = comm::look_for_crossover(world_size(), measuring_time, sum, [] { return Seconds(Clock::now().time_since_epoch()); });
  wire_bytes_ = sent;
}

void Executor::handshake(Call call, std::chrono::milliseconds timeout) {
  check_open();
  call.number = calls_ + 1;
  begin(call);
  CallOptions options;
  options.timeout = timeout;
  const Invocation work = invocation_of(handshake_, native, options, {}, {}, 0);
  supervise(work, [&](Deadline deadline) { return schedule_->run(work, deadline); });
  calls_ = call.number;
}

void Executor::reduce_scatter(const ExecutionContext& context, float* values, int64_t numel, const std::vector<Span>& shards, bool average,
                              std::chrono::milliseconds timeout) {
  if (Collectives* const backend = transport_->collectives()) {
    return enqueue(Collective::reduce_scatter, context, {values}, numel, timeout,
                   [&] { backend->reduce_scatter(context, values, shards, average); });
  }
  CallOptions call;
  call.collective = Collective::reduce_scatter;
  call.is_half = true;
  call.shards = shards;
  call.average = average;
  call.timeout = timeout;
  run(context, {values}, numel, call);
}

void Executor::all_gather(const ExecutionContext& context, float* values, int64_t numel, const std::vector<Span>& shards,
                          std::chrono::milliseconds timeout) {
  if (Collectives* const backend = transport_->collectives()) {
    return enqueue(Collective::all_gather, context, as_bytes(values), 2 * numel, timeout,
                   [&] { backend->all_gather(context, values, shards); });
  }
  CallOptions call;
  call.collective = Collective::all_gather;
  call.is_half = true;
  call.shards = shards;
  call.timeout = timeout;
  run(context, {values}, numel, call);
}

void Executor::all_reduce_natively(const ExecutionContext& context, void* values, int64_t numel, ScalarType type, bool average,
                                   std::chrono::milliseconds timeout) {
  TypedPointer poisoned{nullptr};
  if (type == ScalarType::fp32) poisoned = {values};
  if (type == ScalarType::fp16) poisoned = {values, Dtype::fp16};
  if (type == ScalarType::bf16) poisoned = {values, Dtype::bf16};
  enqueue(Collective::all_reduce, context, poisoned, numel, timeout,
          [&] { transport_->collectives()->all_reduce(context, values, numel, type, average); });
}

void Executor::all_reduce_natively(std::chrono::milliseconds timeout, const std::function<void()>& collective) {
  enqueue(Collective::all_reduce, {}, {nullptr}, 1, timeout, collective);
}

void Executor::enqueue(Collective collective, const ExecutionContext& context, const TypedPointer& values, int64_t numel,
                       std::chrono::milliseconds timeout, const std::function<void()>& enqueue_it) {
  check_open();
  if (numel > 0) {
    CallOptions call;
    call.collective = collective;
    call.is_half = collective != Collective::all_reduce;
    call.timeout = timeout;
    const Invocation work = invocation_of(handshake_, native, call, context, values, numel);
    Waiting waiting;
    for (int rank = 0; rank < world_size(); ++rank) {
      if (rank != this->rank()) waiting.peers.push_back(rank);
    }
    schedule_->wait_for(waiting);
    supervise(work, [&](Deadline) {
      enqueue_it();
      std::vector<Stage> stages;
      if (context.on_cuda()) stages.push_back({Event::record(context), waiting});
      return stages;
    });
  }
  ++calls_;
}

const Program& Executor::program(const CallOptions& call, const Codec& codec, int64_t numel, Result result) {
  constexpr size_t most = 256;
  const Crossover* const crossover = call.measures && crossover_ ? &*crossover_ : nullptr;
  const int64_t segment_bytes = result == Result::message ? 0 : this->segment_bytes();  // encoded() knows of no transport
  const auto [algorithm, segments] = selection_of(call, codec, numel, world_size(), crossover, segment_bytes);
  static const Layout whole;
  const Layout& layout = call.layout ? *call.layout : whole;
  const auto key = std::make_tuple(algorithm, codec_index(codec), numel, segments, result, call.root);
  if (const auto found = programs_.find(std::tie(key, layout, call.shards)); found != programs_.end()) return found->second;
  const Plan plan = make_plan(call.collective, algorithm_of(algorithm), rank(), world_size(), call.root);
  if (programs_.size() == most) programs_.clear();
  return programs_[{key, layout, call.shards}] = lower(plan, cut(call, codec, numel, segments), result);
}

Invocation Executor::invocation_of(const Program& program, const std::string& algorithm, const CallOptions& call,
                                   const ExecutionContext& context, const TypedPointer& values, int64_t numel) {
  Invocation work{program, algorithm, call, rank(), world_size(), context, values, numel};
  work.scratch = &scratch_;
  return work;
}

void Executor::check_open() const {
  if (const std::string reason = failure(); !reason.empty()) throw CollectiveError(reason);
}

// enqueue: returns when all is done or, on a device, the stages. There it may have to wait for peers, so the watchdog starts before it.
template <class Enqueue>
void Executor::supervise(const Invocation& work, Enqueue enqueue) {
  const auto start = Clock::now();
  const Deadline deadline = start + work.call.timeout;
  latest_ = work.call.is_half ? Collective::all_reduce : work.call.collective;
  const BusyFlag under_way(under_way_);
  std::optional<int64_t> watched;
  try {
    if (work.context.on_cuda()) watched = watchdog_.begin({work.context.device, deadline, giving_up(work, start)});
    std::vector<Stage> stages = enqueue(deadline);
    if (!stages.empty()) poison(work);
    if (!stages.empty() && is_captured(work.context)) {  // the events of a captured call never pass
      failure_.captured();
      stages.clear();
    }
    if (watched) watchdog_.enqueued(*watched, std::move(stages));
  } catch (const std::exception& error) {
    if (watched) watchdog_.enqueued(*watched, {});
    fail(work, schedule_->waiting(), error, Clock::now() - start);
  }
}

// Poisons the memory of the result if the call fails.
void Executor::poison(const Invocation& work) {
  if (work.call.message) {
    failure_.poison(work.context, as_bytes(work.call.message), work.program.slots / 2);
  } else if (work.call.shard.data) {
    failure_.poison(work.context, work.call.shard, work.call.shards[rank()].count);
  } else if (!adds_up(work.call.collective) && work.values.dtype == Dtype::fp32) {
    failure_.poison(work.context, as_bytes(work.values.data), 2 * work.numel);
  } else if (work.values.data) {
    failure_.poison(work.context, work.values, work.numel);
  }
}

std::function<void(const Waiting*, const std::string&)> Executor::giving_up(const Invocation& work, Clock::time_point start) {
  return [this, start, call_name = call_name(work), timeout = work.call.timeout, rounds = work.program.rounds](const Waiting* enqueued,
                                                                                                               const std::string& why) {
    const Waiting waiting = enqueued ? *enqueued : schedule_->waiting();
    const auto after = Clock::now() - start;
    const std::string finding = find_culprit(waiting);
    abort(describe(call_name, waiting, rounds, after, timeout, finding.empty() ? why : text(why, "; ", finding)));
  };
}

std::string Executor::find_culprit(const Waiting& waiting, const std::exception* error) {
  if (!failure_detector_ || failure_.is_set()) return {};
  const Waiting global_waiting = with_global_ranks(waiting);
  if (dynamic_cast<const Disagreement*>(error)) return failure_detector_->declare(Diagnosis::Cause::disagreement, global_waiting);
  if (error && !dynamic_cast<const TransportError*>(error)) return failure_detector_->declare(Diagnosis::Cause::failure, global_waiting);
  return failure_detector_->explain(global_waiting);
}

// After any error the messages of the group are out of step, so later calls fail, too.
void Executor::fail(const Invocation& work, const Waiting& waiting, const std::exception& error, Clock::duration after) {
  broken_ = true;
  const std::string finding = find_culprit(waiting, &error);  // before this rank closes, so that others do not take it for the culprit
  {
    std::lock_guard lock(closing_);
    if (!failure_.is_set()) failure_.set(describe_failure(work, waiting, error, after, finding));
  }
  abort_connections();
  close();  // before forget(), because the notification of the peers must follow the sends in progress
  schedule_->forget();
  throw CollectiveError(failure());
}

std::string Executor::describe_failure(const Invocation& work, const Waiting& waiting, const std::exception& error, Clock::duration after,
                                       const std::string& finding) const {
  std::string what = error.what();
  const bool named = dynamic_cast<const Disagreement*>(&error) || dynamic_cast<const PeerClosed*>(&error);  // the text describes the peer
  for (int peer = 0; peer < world_size() && !named; ++peer) {
    const std::string words = peer == rank() || !transport_->framing() ? "" : transport_->framing()->last_words(peer);
    if (!words.empty()) what += text("; rank ", global(peer), ": ", words);
  }
  if (!finding.empty()) what += "; " + finding;
  return describe(call_name(work), waiting, work.program.rounds, after, work.call.timeout, what);
}

std::string Executor::describe(const std::string& call_name, const Waiting& waiting, int rounds, Clock::duration after,
                               Clock::duration timeout, const std::string& what) const {
  std::string peers = waiting.peers.size() > 1 ? "one of the ranks " : "rank ";
  for (const int& peer : waiting.peers) peers += text(&peer == waiting.peers.data() ? "" : ", ", global(peer));
  return text(call_name, " on rank ", global(rank()), " in a group of ", world_size(), ": waiting for ", peers, " in round ", waiting.round,
              " of ", rounds, " failed after ", seconds(after), " s (deadline ", seconds(timeout), " s): ", what);
}

// The reason is set first, because a poison kernel that runs when the connections have been aborted must read it.
void Executor::abort(const std::string& reason) {
  broken_ = true;
  failure_.set(reason);
  schedule_->abort();
  abort_connections();
}

void Executor::begin(const Call& call) {
  if (Framing* const framing = transport_->framing()) framing->begin(call);
}

std::string Executor::connection_error() const {
  Health* const health = transport_->health();
  return health ? health->error() : std::string();
}

void Executor::abort_connections() {
  if (Health* const health = transport_->health()) health->abort();
}

void Executor::end(const std::string& reason) {
  constexpr auto detection_time = std::chrono::milliseconds(50);  // the watchdog needs less to detect that a call is done
  if (!enqueues() || broken_ || !watchdog_.is_over(detection_time)) return abort(reason);
  failure_.set(reason);
  close();
}

void Executor::give_up(const std::string& finding) {
  broken_ = true;
  failure_.set_for_now(text(name(latest_), " on rank ", global(rank()), " in a group of ", world_size(), ": ", finding));
  schedule_->abort();
  abort_connections();
}

Waiting Executor::waiting() { return with_global_ranks(under_way_ ? schedule_->waiting() : watchdog_.waiting()); }

Waiting Executor::with_global_ranks(Waiting waiting) const {
  for (int& peer : waiting.peers) peer = global(peer);
  return waiting;
}

void Executor::close() noexcept {
  std::lock_guard lock(closing_);
  transport_->close();
}

}  // namespace dltrain::comm
