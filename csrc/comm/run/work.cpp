#include "comm/run/work.h"

namespace dltrain::comm {

// Each codec's are given to it together: they are of different regions, or of different chunks of one.
void Work::sum(std::span<const Part* const> parts) const {
  const During during(call.observer, Phase::encode);
  size_t messages = 0;
  for (const Part* part : parts) {
    for (const SumStep& step : part->sums) messages += step.received.size();
  }
  lists->received.clear();
  lists->received.reserve(messages);  // where they lie is noted
  for (const Codec& codec : codecs()) {
    lists->sums.clear();
    for (const Part* part : parts) {
      for (const SumStep& step : part->sums) {
        if (step.region.codec != &codec) continue;
        if (const auto sum = sum_of(step)) lists->sums.push_back(*sum);
      }
    }
    if (!lists->sums.empty()) codec.encode_sums(place, lists->sums);
  }
}

std::optional<Sum> Work::sum_of(const SumStep& step) const {
  const bool encodes = step.slot >= 0;
  Sum sum;
  sum.numel = step.region.span.count;
  if (step.own) {
    sum.own = values.from(step.region.span.first);
    sum.own_place = step.own_place;
    if (call.average) sum.scale = call.weight > 0 ? call.weight : 1.0f / static_cast<float>(world_size);
    const int64_t origin = call.collective == Collective::all_gather ? call.shares[rank].first : 0;
    if (encodes) sum.feedback = call.feedback.from(step.region.span.first - origin);
    // The message of what is there already.
    if (program.result == Result::values_in_place && step.received.empty() && sum.scale == 1.0f && !sum.feedback.residual.data) return {};
  }
  sum.received = lists->received.data() + lists->received.size();
  sum.count = static_cast<int>(step.received.size());
  for (const Location& location : step.received) lists->received.push_back(reinterpret_cast<const uint8_t*>(at(location)));
  if (encodes) sum.message = reinterpret_cast<uint8_t*>(slots + step.slot);
  if (step.decodes) sum.decoded = result(step.region.span);
  sum.rounding = {call.stochastic, {call.seed, this->step, static_cast<uint32_t>(rank)}, call.first + step.region.number};
  return sum;
}

Elements Work::result(const Span& span) const {
  return call.share.data ? call.share.from(span.first - call.shares[rank].first) : values.from(span.first);
}

void Work::decode(std::span<const Part* const> parts) const {
  const During during(call.observer, Phase::decode);
  lists->decodes.clear();
  for (const Part* part : parts) lists->decodes.insert(lists->decodes.end(), part->decodes.begin(), part->decodes.end());
  comm::decode(place, lists->decodes, slots, values, lists->decodings);
}

void decode(const Place& place, std::span<const DecodeStep> steps, const char* messages, const Elements& values,
            std::vector<Decoding>& decodings) {
  for (const Codec& codec : codecs()) {
    decodings.clear();
    for (const auto& [region, slot] : steps) {
      if (region.codec != &codec) continue;
      const auto* const message = reinterpret_cast<const uint8_t*>(messages + slot);
      decodings.push_back({region.span.count, message, values.from(region.span.first)});
    }
    if (!decodings.empty()) codec.decode_all(place, decodings);
  }
}

}  // namespace dltrain::comm
