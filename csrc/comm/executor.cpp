#include "comm/executor.h"

#include <algorithm>

#include "core/check.h"
#include "kernels/codec.h"

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
  Work work{numel > 0 ? program : meeting_, algorithms()[program.algorithm], call, codec, place, values};
  work.slots = static_cast<char*>(in_place ? values.data : slots_.reserve(place, program.slots));
  work.inbox = static_cast<char*>(inbox_.reserve(place, program.inbox));
  work.step = call.step.value_or(static_cast<uint32_t>(number));
  run(work);
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

const Program& Executor::program(const AllReduce& call, const Codec& codec, int64_t numel, bool in_place) {
  constexpr size_t most = 256;
  const int algorithm = resolve(call.algorithm, world_size(), numel * static_cast<int64_t>(sizeof(float)), codec.is_lossy());
  const int segments = call.segments ? call.segments : choose_segments(codec.bytes(numel), codec.is_lossy(), is_pipelined(algorithm));
  const auto key = std::make_tuple(algorithm, index_of(codec), numel, segments, in_place);
  if (const auto found = programs_.find(key); found != programs_.end()) return found->second;
  const Plan plan = make_plan(algorithms()[algorithm], rank(), world_size());
  if (programs_.size() == most) programs_.clear();
  return programs_[key] = lower(plan, codec, numel, segments, in_place);
}

void Executor::run(const Work& work) {
  const Program& program = work.program;
  const auto start = Clock::now();
  const Deadline deadline = start + work.call.timeout;
  try {
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
  } catch (const std::exception& error) {
    fail(work, error, Clock::now() - start);
  }
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
    failure_ = text("all_reduce with ", work.algorithm, " on rank ", global(rank()), " in a group of ", world_size(), ": waiting for rank ",
                    global(waiting_.peer), " in round ", waiting_.round, " of ", work.program.rounds, " failed after ", seconds(after),
                    " s (deadline ", seconds(work.call.timeout), " s): ", what);
  }
  transport_->close();  // while sends are under way still: they are ahead of what it tells
  in_flight_.clear();
  throw AllReduceError(failure_);
}

void Executor::post(const Work& work, const Transfer& transfer, bool send) {
  std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw TransportError(failure_);
  waiting_ = transfer;
  InFlight& segment = in_flight_[transfer.segment];
  char* const data = work.at(transfer.location);
  if (send) {
    segment.now.push_back({transfer, transport_->send(work.place, transfer.peer, data, transfer.bytes)});
  } else {
    segment.ahead.push_back({transfer, transport_->recv(work.place, transfer.peer, data, transfer.bytes)});
  }
}

// Waits for what the segment has under way; the receives posted ahead are under way from now on.
void Executor::complete(InFlight& segment, Deadline deadline) {
  for (Posted& posted : segment.now) {
    waiting_ = posted.transfer;
    posted.request->wait(deadline);
  }
  std::lock_guard lock(mutex_);
  segment.now.clear();
  segment.now.swap(segment.ahead);
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
  sum.first = step.span.first;
  work.codec.encode_sum(work.place, sum);
}

void Executor::decode(const Work& work, const DecodeStep& step) {
  work.codec.decode(work.place, step.span.count, reinterpret_cast<const uint8_t*>(work.slots + step.slot),
                    work.values.from(step.span.first), {});
}

void Executor::abort(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = reason;
  for (InFlight& segment : in_flight_) {
    for (auto* posted : {&segment.now, &segment.ahead}) {
      for (Posted& each : *posted) each.request->abort();
    }
  }
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
