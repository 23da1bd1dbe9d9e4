#include "comm/transport/call.h"

#include "comm/plan/plan.h"
#include "core/check.h"
#include "kernels/codec.h"

namespace dltrain::comm {

std::string describe(const Call& call) {
  const bool native = call.algorithm == Call::native, known = is_plan(call.algorithm);
  const Collective collective = known ? collective_of(call.algorithm) : Collective::all_reduce;
  const std::string codec = call.codec >= 0 && call.codec < std::ssize(codecs()) ? codecs()[call.codec].name : text("codec ", call.codec);
  const std::string plan = known ? algorithm_of(call.algorithm) : text("plan ", call.algorithm);
  return text("call ", call.number, ": ", name(collective),
              native ? text(" natively in ", call.type.data()) : text(" in ", codec, " by ", plan),
              is_rooted(collective) ? text(" with root ", call.root) : "", " over ", call.numel,
              call.numel == 1 ? " element in " : " elements in ", call.segments, call.segments == 1 ? " segment" : " segments",
              !native && call.type[0] ? text(" of ", call.type.data()) : "", call.layout ? text(" of layout ", call.layout) : "",
              !adds_up(collective) ? ""
              : call.average       ? ", averaged"
                                   : ", summed");
}

}  // namespace dltrain::comm
