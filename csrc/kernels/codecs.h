#pragma once

// The list of all codecs. The operations that encode and decode are compiled for each of them, and their names are taken from this list.

#include <tuple>
#include <type_traits>

#include "core/host_device.h"
#include "core/tensor_list.h"
#include "math/codecs/bf16.h"
#include "math/codecs/fp16.h"
#include "math/codecs/fp8.h"
#include "math/codecs/int4.h"
#include "math/codecs/int8.h"
#include "math/codecs/raw.h"
#include "math/codecs/root8.h"
#include "math/codecs/sign.h"
#include "math/codecs/softsign8.h"

namespace dltrain {

using Codecs = std::tuple<math::Raw, math::FP16, math::BF16, math::FP8, math::Int8, math::Int4, math::Sign>;

// The codecs in which a stream of a tensor list may be stored, for states with and without a sign. A warp loads a block of these codecs
// with one access per lane.
using StreamCodecs = std::tuple<math::Softsign8, math::Root8>;

// Calls visit(type_identity<C>) for the codec C of a stream's format.
template <class Visit>
DLT_HD void with_codec(const Format& format, Visit&& visit) {
  const auto all = [&]<class... C>(std::type_identity<std::tuple<C...>>) DLT_HD_LAMBDA {
    int number = 0;
    ((format.codec == number++ ? visit(std::type_identity<C>()) : void()), ...);
  };
  all(std::type_identity<StreamCodecs>());
}

template <class C>
constexpr Format format_of() {
  Format format;
  const auto all = [&]<class... All>(std::type_identity<std::tuple<All...>>) {
    int8_t number = 0;
    ((std::is_same_v<C, All> ? void(format.codec = number++) : void(number++)), ...);
  };
  all(std::type_identity<StreamCodecs>());
  return format;
}

}  // namespace dltrain
