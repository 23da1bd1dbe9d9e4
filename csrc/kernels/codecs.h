#pragma once

// Every codec, once: what encodes and decodes is compiled for what stands here, and the names of them come from here.

#include <tuple>

#include "math/codecs/bf16.h"
#include "math/codecs/fp16.h"
#include "math/codecs/fp8.h"
#include "math/codecs/int4.h"
#include "math/codecs/int8.h"
#include "math/codecs/raw.h"
#include "math/codecs/sign.h"

namespace dltrain {

using Codecs = std::tuple<math::Raw, math::FP16, math::BF16, math::FP8, math::Int8, math::Int4, math::Sign>;

}  // namespace dltrain
