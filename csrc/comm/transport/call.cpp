#include "comm/transport/call.h"

#include "comm/plan/plan.h"
#include "core/check.h"
#include "kernels/codec.h"

namespace dltrain::comm {

std::string describe(const Call& call) {
  const auto at = [](const auto& names, int32_t place) {
    return place >= 0 && place < std::ssize(names) ? names[place] : text("number ", place);
  };
  const std::string how = call.algorithm == Call::native ? text("native, ", call.type.data())
                                                         : text(at(codec_names(), call.codec), " by ", at(plan_names(), call.algorithm));
  return text("call ", call.number, ": ", how, " over ", call.numel, call.numel == 1 ? " element in " : " elements in ", call.segments,
              call.segments == 1 ? " segment" : " segments", call.layout ? text(" of layout ", call.layout) : "",
              call.average ? ", averaged" : ", summed");
}

}  // namespace dltrain::comm
