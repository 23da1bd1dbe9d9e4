#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/codecs.h"
#include "kernels/message.h"

// A state of an optimizer is fp32 in the shape of its parameter, or codes: a message, as a tensor of bytes of one dimension.

namespace dltrain::bindings {

inline bool is_coded(const at::Tensor& state) { return state.unsafeGetTensorImpl()->dtype() == caffe2::TypeMeta::Make<uint8_t>(); }

inline Format codes_of(bool nonnegative) { return nonnegative ? format_of<math::Root8>() : format_of<math::Softsign8>(); }

// The bytes of the codes.
inline int64_t state_bytes(int64_t numel) {
  using Layout = MessageLayout<math::Softsign8>;
  static_assert(Layout::tile == MessageLayout<math::Root8>::tile && Layout::words == MessageLayout<math::Root8>::words);
  return Layout::bytes(numel);
}

}  // namespace dltrain::bindings
