#include "comm/run/invocation.h"

namespace dltrain::comm {

TypedPointer CallOptions::minus_from(int64_t first) const {
  if (minus.empty()) return {};
  const size_t region = region_at(*layout, first);
  return minus[region].from(first - (*layout)[region].span.first);
}

const char* Invocation::found_at(const Location& location) const {
  if (location.area == Location::Area::slots || scratch->places.empty()) return at(location);
  const char* const place = scratch->places[location.offset / program.receive_slot];
  return place ? place + location.offset % program.receive_slot : at(location);
}

// The sums of a codec are computed together. They are independent: they are of different regions, or of different chunks of a region.
void Invocation::sum(std::span<const SegmentWork* const> parts) const {
  const PhaseScope during(call.observer, Phase::encode);
  size_t messages = 0;
  for (const SegmentWork* part : parts) {
    for (const SumStep& step : part->sums) messages += step.received.size();
  }
  scratch->received.clear();
  scratch->received.reserve(messages);  // because sums keep pointers into it
  for (const Codec& codec : codecs()) {
    scratch->sums.clear();
    for (const SegmentWork* part : parts) {
      for (const SumStep& step : part->sums) {
        if (step.region.codec != &codec) continue;
        if (const auto sum = sum_of(step)) scratch->sums.push_back(*sum);
      }
    }
    if (!scratch->sums.empty()) codec.encode_sums(context, scratch->sums);
  }
}

std::optional<Sum> Invocation::sum_of(const SumStep& step) const {
  const bool encodes = step.slot >= 0;
  Sum sum;
  sum.numel = step.region.span.count;
  if (step.own) {
    sum.own = values.from(step.region.span.first);
    sum.minus = call.minus_from(step.region.span.first);
    sum.own_position = step.own_position;
    if (call.average) sum.scale = call.weight > 0 ? call.weight : 1.0f / static_cast<float>(world_size);
    const int64_t origin = call.collective == Collective::all_gather && !call.layout ? call.shards[rank].first : 0;
    if (encodes) sum.feedback = call.feedback.from(step.region.span.first - origin);
    // The slot is the tensor itself, so the message is there already.
    if (program.result == Result::values_in_place && step.received.empty() && sum.scale == 1.0f && !sum.feedback.residual.data) return {};
  }
  sum.received = scratch->received.data() + scratch->received.size();
  sum.count = static_cast<int>(step.received.size());
  for (const Location& location : step.received) scratch->received.push_back(reinterpret_cast<const uint8_t*>(found_at(location)));
  if (encodes) sum.message = reinterpret_cast<uint8_t*>(slots + step.slot);
  if (step.decodes) sum.decoded = result(step.region.span);
  sum.rounding = {call.stochastic, {call.seed, this->step, static_cast<uint32_t>(rank)}, call.first + step.region.number};
  return sum;
}

TypedPointer Invocation::result(const Span& span) const {
  return call.shard.data ? call.shard.from(span.first - call.shards[rank].first) : values.from(span.first);
}

void Invocation::decode(std::span<const SegmentWork* const> parts) const {
  const PhaseScope during(call.observer, Phase::decode);
  scratch->decodes.clear();
  for (const SegmentWork* part : parts) scratch->decodes.insert(scratch->decodes.end(), part->decodes.begin(), part->decodes.end());
  comm::decode(context, scratch->decodes, slots, values, scratch->decodings);
}

void decode(const ExecutionContext& context, std::span<const DecodeStep> steps, const char* messages, const TypedPointer& values,
            std::vector<Decoding>& decodings) {
  for (const Codec& codec : codecs()) {
    decodings.clear();
    for (const auto& [region, slot] : steps) {
      if (region.codec != &codec) continue;
      const auto* const message = reinterpret_cast<const uint8_t*>(messages + slot);
      decodings.push_back({region.span.count, message, values.from(region.span.first)});
    }
    if (!decodings.empty()) codec.decode_all(context, decodings);
  }
}

}  // namespace dltrain::comm
