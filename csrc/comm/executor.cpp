#include "comm/executor.h"

#include <algorithm>

#include "core/check.h"
#include "kernels/codec.h"

namespace dltrain::comm {

namespace {

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// A few segments hide folding behind sending; many only add messages.
int choose_segments(int64_t nbytes) {
  constexpr int64_t segment = 8 << 20, most = 8;
  return static_cast<int>(std::clamp<int64_t>(nbytes / segment, 1, most));
}

}  // namespace

void check_names(const std::string& algorithm, const std::string& codec) {
  if (algorithm != "auto") make_plan(algorithm, 0, 1);
  check(codec == "raw", "codec: expected one of raw (all that an all-reduce carries so far), got '", codec, "'");
}

void Executor::all_reduce(const Place& place, float* values, int64_t numel, const AllReduce& call) {
  check(numel >= 0, "numel: expected at least 0, got ", numel);
  check(call.segments >= 0, "segments: expected at least 0, got ", call.segments);
  if (const std::string reason = failure(); !reason.empty()) throw AllReduceError(reason);
  const Program& program = this->program(call, numel);
  run(program, call, place, values);
  ++calls_;
  wire_bytes_ += program.sent * static_cast<int64_t>(sizeof(float));
}

const Program& Executor::program(const AllReduce& call, int64_t numel) {
  constexpr size_t most = 256;
  const int64_t nbytes = numel * static_cast<int64_t>(sizeof(float));
  const std::string algorithm = resolve(call.algorithm, world_size(), nbytes);
  const int segments = call.segments ? call.segments : choose_segments(nbytes);
  const auto key = std::make_tuple(algorithm, call.codec, numel, segments);
  if (const auto found = programs_.find(key); found != programs_.end()) return found->second;
  if (programs_.size() == most) programs_.clear();
  return programs_[key] = lower(make_plan(algorithm, rank(), world_size()), find_codec(call.codec), numel, segments);
}

void Executor::run(const Program& program, const AllReduce& call, const Place& place, float* values) {
  const float scale = call.average ? 1.0f / static_cast<float>(world_size()) : 1.0f;
  const auto start = Clock::now();
  const Deadline deadline = start + call.timeout;
  inbox_ = static_cast<float*>(buffer_.reserve(place, program.inbox * static_cast<int64_t>(sizeof(float))));

  try {
    {
      std::lock_guard lock(mutex_);
      in_flight_.resize(program.segments);
    }
    for (const Transfer& transfer : program.first) post(transfer, false, place, values);
    for (const auto& tick : program.ticks) {
      for (const Part& part : tick) {
        complete(in_flight_[part.segment], deadline);
        for (const FoldStep& step : part.folds) fold(step, place, values, scale);
        for (const Transfer& transfer : part.sends) post(transfer, true, place, values);
        for (const Transfer& transfer : part.ahead) post(transfer, false, place, values);
      }
    }
  } catch (const TransportError& error) {
    const std::string reason =
        text("all_reduce with ", program.algorithm, " on rank ", global(rank()), " in a group of ", world_size(), ": waiting for rank ",
             global(waiting_.peer), " in round ", waiting_.round, " of ", program.rounds, " failed after ", seconds(Clock::now() - start),
             " s (deadline ", seconds(call.timeout), " s): ", error.what());
    std::lock_guard lock(mutex_);
    in_flight_.clear();
    if (failure_.empty()) failure_ = reason;
    throw AllReduceError(failure_);
  }
}

void Executor::post(const Transfer& transfer, bool send, const Place& place, float* values) {
  float* data = (transfer.inbox ? inbox_ : values) + transfer.span.first;
  const int64_t bytes = transfer.span.count * static_cast<int64_t>(sizeof(float));
  std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw TransportError(failure_);
  waiting_ = transfer;
  InFlight& segment = in_flight_[transfer.segment];
  if (send) {
    segment.now.push_back({transfer, transport_->send(place, transfer.peer, data, bytes)});
  } else {
    segment.ahead.push_back({transfer, transport_->recv(place, transfer.peer, data, bytes)});
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

void Executor::fold(const FoldStep& step, const Place& place, float* values, float scale) {
  const float own_scale = step.scales ? scale : 1.0f;
  if (step.inboxes.empty() && own_scale == 1.0f) return;
  std::vector<const uint8_t*> received;
  received.reserve(step.inboxes.size());
  for (int64_t inbox : step.inboxes) received.push_back(reinterpret_cast<const uint8_t*>(inbox_ + inbox));
  Sum sum;
  sum.numel = step.span.count;
  sum.own = sum.decoded = {values + step.span.first};
  sum.scale = own_scale;
  sum.received = received.data();
  sum.count = static_cast<int>(received.size());
  sum.own_place = step.own_place;
  find_codec("raw").encode_sum(place, sum);
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

std::string Executor::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace dltrain::comm
