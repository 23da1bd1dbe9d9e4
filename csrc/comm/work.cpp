#include "comm/work.h"

namespace dltrain::comm {

void Work::sum(const std::vector<SumStep>& steps) const {
  const During during(call.observer, Phase::encode);
  for (const SumStep& step : steps) sum(step);
}

void Work::sum(const SumStep& step) const {
  const bool encodes = step.slot >= 0;
  Sum sum;
  sum.numel = step.region.span.count;
  if (step.own) {
    sum.own = values.from(step.region.span.first);
    sum.own_place = step.own_place;
    sum.scale = call.average ? 1.0f / static_cast<float>(world_size) : 1.0f;
    if (encodes) sum.feedback = call.feedback.from(step.region.span.first);
    // The message of what is there already.
    if (program.in_place && step.received.empty() && sum.scale == 1.0f && !sum.feedback.residual.data) return;
  }
  received->clear();
  for (const Location& location : step.received) received->push_back(reinterpret_cast<const uint8_t*>(at(location)));
  sum.received = received->data();
  sum.count = static_cast<int>(received->size());
  if (encodes) sum.message = reinterpret_cast<uint8_t*>(slots + step.slot);
  if (step.decodes) sum.decoded = result(step.region.span);
  sum.stochastic = call.stochastic;
  sum.random = {call.seed, this->step, static_cast<uint32_t>(rank)};
  sum.first = call.first + step.region.number;
  step.region.codec->encode_sum(place, sum);
}

Elements Work::result(const Span& span) const {
  return call.share.data ? call.share.from(span.first - numel / world_size * rank) : values.from(span.first);
}

void Work::decode(const std::vector<DecodeStep>& steps) const {
  const During during(call.observer, Phase::decode);
  for (const auto& [region, slot] : steps) {
    region.codec->decode(place, region.span.count, reinterpret_cast<const uint8_t*>(slots + slot), values.from(region.span.first), {});
  }
}

}  // namespace dltrain::comm
