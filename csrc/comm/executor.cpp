#include "comm/executor.h"

#include <algorithm>

#include "core/check.h"
#include "core/cuda/runtime.h"
#include "kernels/codec.h"
#include "kernels/for_each.h"

namespace dltrain::comm {

namespace {

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// A few segments hide encoding behind sending, and more only add messages. Lossless ones have nothing to hide. By measurement: behind links
// of 1 Gbit/s, and over loopback, where sending is the processor's work too, so that each segment costs.
int choose_segments(int64_t wire_bytes, bool lossy, bool pipelined) {
  const auto pieces = [wire_bytes](int64_t size, int64_t most) {
    return static_cast<int>(std::clamp<int64_t>(wire_bytes / size, 1, most));
  };
  constexpr int64_t kib = 1 << 10;
  if (pipelined) return pieces(1024 * kib, 16);
  return std::max(pieces(8192 * kib, 8), lossy ? pieces(640 * kib, 3) : 1);
}

bool is_captured(const Place& place) {
  if constexpr (built_with_cuda) return cuda::is_capturing(place);
  return false;
}

int index_of(const Codec& codec) { return static_cast<int>(&codec - codecs().data()); }

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

void Executor::all_reduce(const Place& place, const Elements& values, int64_t numel, const AllReduce& call) {
  check(numel >= 0, "numel: expected at least 0, got ", numel);
  check(call.segments >= 0, "segments: expected at least 0, got ", call.segments);
  if (const std::string reason = failure(); !reason.empty()) throw AllReduceError(reason);
  const Codec& codec = find_codec(call.codec);
  const bool in_place = call.codec == "raw" && values.dtype == Dtype::fp32;
  const Program& program = this->program(call, codec, numel, in_place);
  const int64_t number = calls_ + 1;
  transport_->begin({number, numel, program.algorithm, index_of(codec), program.segments, call.average});
  Work work{numel > 0 ? program : meeting_, plan_names()[program.algorithm], call, codec, place, values, numel};
  work.slots = static_cast<char*>(in_place ? values.data : slots_.reserve(place, program.slots));
  work.inbox = static_cast<char*>(inbox_.reserve(place, program.inbox));
  work.step = call.step.value_or(static_cast<uint32_t>(number));
  run(work);
  if (place.on_cuda()) {  // a captured graph has memory of its own
    slots_ = {};
    inbox_ = {};
  }
  calls_ = number;
  wire_bytes_ += program.sent;
}

void Executor::meet(Call call, std::chrono::milliseconds timeout) {
  if (const std::string reason = failure(); !reason.empty()) throw AllReduceError(reason);
  call.number = calls_ + 1;
  transport_->begin(call);
  AllReduce waits;
  waits.algorithm = "native";
  waits.timeout = timeout;
  run({meeting_, waits.algorithm, waits, find_codec(waits.codec), {}, {}});
  calls_ = call.number;
}

void Executor::reduce_scatter(const Place& place, float* values, int64_t numel, bool average, std::chrono::milliseconds timeout) {
  if (Collectives* const backend = transport_->collectives()) {
    return enqueue("reduce_scatter", place, {values}, numel, timeout,
                   [&] { backend->reduce_scatter(place, values, shares(numel), average); });
  }
  AllReduce half;
  half.algorithm = "reduce_scatter";
  half.average = average;
  half.segments = 1;
  half.timeout = timeout;
  all_reduce(place, {values}, numel, half);
}

void Executor::all_gather(const Place& place, float* values, int64_t numel, std::chrono::milliseconds timeout) {
  if (Collectives* const backend = transport_->collectives()) {
    return enqueue("all_gather", place, {values}, numel, timeout, [&] { backend->all_gather(place, values, shares(numel)); });
  }
  AllReduce half;
  half.algorithm = "all_gather";
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

void Executor::enqueue(const char* name, const Place& place, const Elements& values, int64_t numel, std::chrono::milliseconds timeout,
                       const std::function<void()>& collective) {
  if (const std::string reason = failure(); !reason.empty()) throw AllReduceError(reason);
  if (numel > 0) {
    AllReduce call;
    call.timeout = timeout;
    const std::string algorithm = name;
    const Work work{meeting_, algorithm, call, find_codec(call.codec), place, values, numel};
    waiting_ = {everybody_else(), 0};
    const auto start = Clock::now();
    try {
      collective();
      if (place.on_cuda()) watch_over(work, {{Event::record(place), waiting_.round, waiting_.peers}}, start);
    } catch (const std::exception& error) {
      fail(work, error, Clock::now() - start);
    }
  }
  ++calls_;
}

std::vector<Span> Executor::shares(int64_t numel) const {
  std::vector<Span> all;
  for (int rank = 0; rank < world_size(); ++rank) all.push_back(share(numel, world_size(), rank));
  return all;
}

std::vector<int> Executor::everybody_else() const {
  std::vector<int> all;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank != this->rank()) all.push_back(rank);
  }
  return all;
}

const Program& Executor::program(const AllReduce& call, const Codec& codec, int64_t numel, bool in_place) {
  constexpr size_t most = 256;
  const int algorithm = resolve(call.algorithm, world_size(), numel * static_cast<int64_t>(sizeof(float)), codec.is_lossy());
  const int segments = call.segments ? call.segments : choose_segments(codec.bytes(numel), codec.is_lossy(), is_pipelined(algorithm));
  const auto key = std::make_tuple(algorithm, index_of(codec), numel, segments, in_place);
  if (const auto found = programs_.find(key); found != programs_.end()) return found->second;
  const Plan plan = make_plan(plan_names()[algorithm], rank(), world_size());
  if (programs_.size() == most) programs_.clear();
  return programs_[key] = lower(plan, codec, numel, segments, in_place);
}

void Executor::run(const Work& work) {
  const auto start = Clock::now();
  const Deadline deadline = start + work.call.timeout;
  try {
    transport_->in_groups() ? run_in_groups(work, start) : run_one_by_one(work, deadline);
  } catch (const std::exception& error) {
    fail(work, error, Clock::now() - start);
  }
}

// Receives are posted a round ahead, so that a sender finds them.
void Executor::run_one_by_one(const Work& work, Deadline deadline) {
  const Program& program = work.program;
  {
    std::lock_guard lock(mutex_);
    in_flight_.resize(std::max(in_flight_.size(), static_cast<size_t>(program.segments)));
  }
  for (const Transfer& transfer : program.first) post(work, transfer, false);
  for (const auto& tick : program.ticks) {
    for (const Part& part : tick) {
      complete(in_flight_[part.segment], deadline);
      for (const SumStep& step : part.sums) sum(work, step);
      for (const Transfer& transfer : part.sends) post(work, transfer, true);
      for (const Transfer& transfer : part.ahead) post(work, transfer, false);
      for (const DecodeStep& step : part.decodes) decode(work, step);
    }
  }
}

// The messages of a tick go out together, each receive beside its round's sends: in two halves, the even segments' and the odd ones', so
// that one half is encoded while the other is under way.
void Executor::run_in_groups(const Work& work, Clock::time_point start) {
  const Program& program = work.program;
  const Deadline deadline = start + work.call.timeout;
  const bool enqueues = work.place.on_cuda();
  const auto keep = [this](const std::vector<Transfer>& receives) {
    for (const Transfer& transfer : receives) due_[transfer.segment].push_back(transfer);
  };
  std::vector<Watch::Stage> stages;
  due_.assign(program.segments, {});
  keep(program.first);
  for (const auto& tick : program.ticks) {
    for (int half = 0; half < halves; ++half) {
      const auto each_part = [&](auto visit) {
        for (const Part& part : tick) {
          if (part.segment % halves == half) visit(part);
        }
      };
      Group& group = groups_[half];
      if (group.request) {
        complete(group, deadline);
        if (enqueues) stages.push_back({Event::record(work.place), group.waiting.round, group.waiting.peers});
      }
      sends_.clear();
      receives_.clear();
      each_part([&](const Part& part) {
        for (const SumStep& step : part.sums) sum(work, step);
        sends_.insert(sends_.end(), part.sends.begin(), part.sends.end());
        receives_.insert(receives_.end(), due_[part.segment].begin(), due_[part.segment].end());
        due_[part.segment].clear();
      });
      post_group(work, group);
      each_part([&](const Part& part) {
        for (const DecodeStep& step : part.decodes) decode(work, step);
        keep(part.ahead);
      });
    }
  }
  if (enqueues) watch_over(work, std::move(stages), start);
}

// For what has only been enqueued.
void Executor::watch_over(const Work& work, std::vector<Watch::Stage> stages, Clock::time_point start) {
  spoil_if_failed(work);
  if (is_captured(work.place)) return;  // its events never pass
  const auto give_up = [this, start, algorithm = work.algorithm, timeout = work.call.timeout, rounds = work.program.rounds](
                           const Watch::Stage& stage, const std::string& why) {
    abort(failure_of(algorithm, {stage.peers, stage.round}, rounds, Clock::now() - start, timeout, why));
  };
  watch_.add({std::move(stages), start + work.call.timeout, give_up});
}

// Whatever it was, messages are out of step from now on.
void Executor::fail(const Work& work, const std::exception& error, Clock::duration after) {
  std::string what = error.what();
  std::lock_guard lock(mutex_);
  if (failure_.empty()) {
    const bool named = dynamic_cast<const Disagreement*>(&error);  // what the peer does is said
    for (int peer = 0; peer < world_size() && !named; ++peer) {
      const std::string words = peer == rank() ? "" : transport_->last_words(peer);
      if (!words.empty()) what += text("; rank ", global(peer), ": ", words);
    }
    set_failure(failure_of(work.algorithm, waiting_, work.program.rounds, after, work.call.timeout, what));
  }
  transport_->close();  // while sends are under way still: they are ahead of what it tells
  in_flight_.clear();
  for (Group& group : groups_) group.request.reset();
  throw AllReduceError(failure_);
}

std::string Executor::failure_of(const std::string& algorithm, const Waiting& waiting, int rounds, Clock::duration after,
                                 Clock::duration timeout, const std::string& what) const {
  std::string peers = waiting.peers.size() > 1 ? "one of the ranks " : "rank ";
  for (const int& peer : waiting.peers) peers += text(&peer == waiting.peers.data() ? "" : ", ", global(peer));
  return text("all_reduce with ", algorithm, " on rank ", global(rank()), " in a group of ", world_size(), ": waiting for ", peers,
              " in round ", waiting.round, " of ", rounds, " failed after ", seconds(after), " s (deadline ", seconds(timeout),
              " s): ", what);
}

// Before anything is aborted: what then comes to its end on a device must find it.
void Executor::set_failure(const std::string& reason) {
  if (failure_.empty()) failure_ = reason;
  if (auto* const flag = static_cast<int*>(failed_.data())) __atomic_store_n(flag, 1, __ATOMIC_SEQ_CST);
}

void Executor::spoil_if_failed(const Work& work) {
  if (!work.values.data) return;
  {
    std::lock_guard lock(mutex_);
    if (!failed_.data()) {
      failed_ = Memory::pinned(sizeof(int));
      *static_cast<int*>(failed_.data()) = 0;
    }
  }
  const Memory flag(work.place, sizeof(int));
  copy(work.place, flag.data(), failed_.data(), sizeof(int));
  TensorList<Spoil::streams> list(Form<Spoil::streams>{{work.values.dtype}});
  list.add({work.values.data}, work.numel);
  for_each(work.place, list, Spoil{static_cast<const int*>(flag.data())});
}

void Executor::post(const Work& work, const Transfer& transfer, bool send) {
  std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw TransportError(failure_);
  wait_for(transfer);
  InFlight& segment = in_flight_[transfer.segment];
  char* const data = work.at(transfer.location);
  if (send) {
    segment.now.push_back({transfer, transport_->send(work.place, transfer.peer, data, transfer.bytes)});
  } else {
    segment.ahead.push_back({transfer, transport_->recv(work.place, transfer.peer, data, transfer.bytes)});
  }
}

void Executor::post_group(const Work& work, Group& group) {
  if (sends_.empty() && receives_.empty()) return;
  if (const std::string reason = failure(); !reason.empty()) throw TransportError(reason);
  std::vector<Posting> postings;
  const auto& waited_for = receives_.empty() ? sends_ : receives_;
  waiting_ = {{}, waited_for.front().round};
  for (const Transfer& transfer : waited_for) {
    if (std::find(waiting_.peers.begin(), waiting_.peers.end(), transfer.peer) == waiting_.peers.end()) {
      waiting_.peers.push_back(transfer.peer);
    }
  }
  for (const auto* transfers : {&sends_, &receives_}) {
    for (const Transfer& transfer : *transfers) {
      postings.push_back({transfers == &sends_, transfer.peer, work.at(transfer.location), transfer.bytes});
    }
  }
  auto request = transport_->exchange(work.place, postings);
  std::lock_guard lock(mutex_);
  group = {std::move(request), waiting_};
}

// Waits for what the segment has under way; the receives posted ahead are under way from now on.
void Executor::complete(InFlight& segment, Deadline deadline) {
  for (Posted& posted : segment.now) {
    wait_for(posted.transfer);
    posted.request->wait(deadline);
  }
  std::lock_guard lock(mutex_);
  segment.now.clear();
  segment.now.swap(segment.ahead);
}

void Executor::complete(Group& group, Deadline deadline) {
  waiting_ = group.waiting;
  group.request->wait(deadline);
  std::lock_guard lock(mutex_);
  group.request.reset();
}

void Executor::wait_for(const Transfer& transfer) {
  waiting_.peers.assign(1, transfer.peer);
  waiting_.round = transfer.round;
}

void Executor::sum(const Work& work, const SumStep& step) {
  const AllReduce& call = work.call;
  const bool encodes = step.slot >= 0;
  Sum sum;
  sum.numel = step.span.count;
  if (step.own) {
    sum.own = work.values.from(step.span.first);
    sum.own_place = step.own_place;
    sum.scale = call.average ? 1.0f / static_cast<float>(world_size()) : 1.0f;
    if (encodes) sum.residual = call.residual.from(step.span.first);
    // The message of what is there already.
    if (work.program.in_place && step.received.empty() && sum.scale == 1.0f && !sum.residual.data) return;
  }
  received_.clear();
  for (const Location& location : step.received) received_.push_back(reinterpret_cast<const uint8_t*>(work.at(location)));
  sum.received = received_.data();
  sum.count = static_cast<int>(received_.size());
  if (encodes) sum.message = reinterpret_cast<uint8_t*>(work.slots + step.slot);
  if (step.decodes) sum.decoded = work.values.from(step.span.first);
  sum.stochastic = call.stochastic;
  sum.random = {call.seed, work.step, static_cast<uint32_t>(rank())};
  sum.first = call.first + step.span.first;
  work.codec.encode_sum(work.place, sum);
}

void Executor::decode(const Work& work, const DecodeStep& step) {
  work.codec.decode(work.place, step.span.count, reinterpret_cast<const uint8_t*>(work.slots + step.slot),
                    work.values.from(step.span.first), {});
}

void Executor::abort(const std::string& reason) {
  std::lock_guard lock(mutex_);
  set_failure(reason);
  for (InFlight& segment : in_flight_) {
    for (auto* posted : {&segment.now, &segment.ahead}) {
      for (Posted& each : *posted) each.request->abort();
    }
  }
  for (Group& group : groups_) {
    if (group.request) group.request->abort();
  }
  transport_->abort();
}

void Executor::close() noexcept {
  std::lock_guard lock(mutex_);
  transport_->close();
}

std::string Executor::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace dltrain::comm
