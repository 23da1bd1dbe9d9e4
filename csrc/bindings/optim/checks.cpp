#include "bindings/optim/checks.h"

namespace dltrain::bindings {

namespace {

void check_place(const at::Tensor& tensor, const char* name, int64_t index, const at::Tensor& param) {
  check_plain(tensor, c10::str(name, "[", index, "]"));
  TORCH_CHECK_VALUE(is_supported(param.device()), name, "[", index, "]: expected a tensor on ", supported_devices(), ", got one on ",
                    tensor.device());
  TORCH_CHECK_VALUE(tensor.device() == param.device(), name, "[", index, "]: expected a tensor on ", param.device(), " as params[", index,
                    "], got one on ", tensor.device());
}

}  // namespace

void refuse(const at::Tensor& tensor, const char* name, int64_t index, const at::Tensor& param, bool may_be_half) {
  check_place(tensor, name, index, param);
  TORCH_CHECK_TYPE(detail::has_type(*tensor.unsafeGetTensorImpl(), may_be_half), name, "[", index, "]: expected dtype float32",
                   may_be_half ? ", float16 or bfloat16" : "", ", got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.sizes() == param.sizes(), name, "[", index, "]: expected shape ", param.sizes(), " of params[", index, "], got ",
                    tensor.sizes());
  check_backed(tensor, c10::str(name, "[", index, "]"));
  TORCH_INTERNAL_ASSERT(false);
}

void check_codes(const at::Tensor& codes, const char* name, int64_t index, const at::Tensor& param) {
  if (detail::are_codes(codes, param)) return;
  check_place(codes, name, index, param);
  const int64_t bytes = state_bytes(param.numel());
  TORCH_CHECK_VALUE(is_coded(codes) && codes.dim() == 1 && codes.numel() == bytes && codes.is_contiguous(), name, "[", index,
                    "]: expected codes in ", bytes, " adjacent bytes for params[", index, "], got ", codes.toString(), " of shape ",
                    codes.sizes());
  TORCH_CHECK_VALUE(codes.storage_offset() % static_cast<int64_t>(sizeof(float)) == 0, name, "[", index,
                    "]: expected codes that begin at a multiple of 4 bytes, got offset ", codes.storage_offset());
  check_backed(codes, c10::str(name, "[", index, "]"));
  TORCH_INTERNAL_ASSERT(false);
}

void check_extension(const at::Tensor& more, const char* name, int64_t index, const at::Tensor& param, bool usable) {
  if (usable && detail::extends(more, param)) return;
  check_place(more, name, index, param);
  TORCH_CHECK_TYPE(usable && param.scalar_type() == at::kBFloat16, name, "[", index, "]: expected float32 for params[", index, "] of ",
                   param.scalar_type(), ", got ", more.scalar_type());
  TORCH_CHECK_VALUE(more.sizes() == param.sizes(), name, "[", index, "]: expected shape ", param.sizes(), " of params[", index, "], got ",
                    more.sizes());
  check_backed(more, c10::str(name, "[", index, "]"));
  TORCH_INTERNAL_ASSERT(false);
}

void check_stochastic(const at::Tensor& param, const char* name, int64_t index) {
  TORCH_CHECK_TYPE(detail::may_be_stochastic(param), name, "[", index, "]: expected float32 or bfloat16 for stochastic rounding, got ",
                   param.scalar_type());
}

void check_counter(const at::Tensor& counter, const std::string& list, int64_t index, const at::Tensor& param) {
  const std::string name = c10::str(list, "[", index, "]");
  check_plain(counter, name);
  TORCH_CHECK_TYPE(detail::counts(counter, param), name, ": expected one float32 number on ", param.device(), ", got ", counter.toString(),
                   " of shape ", counter.sizes());
  check_backed(counter, name);
}

void check_foreign_counter(const at::Tensor& counter, const std::string& list, int64_t index) {
  const std::string name = c10::str(list, "[", index, "]");
  check_plain(counter, name);
  const at::ScalarType type = counter.scalar_type();
  TORCH_CHECK_TYPE((at::isFloatingType(type) || at::isIntegralType(type, /*includeBool=*/false)) && counter.numel() == 1, name,
                   ": expected one number, got ", counter.toString(), " of shape ", counter.sizes());
  TORCH_CHECK_VALUE(!counter.is_meta(), name, ": expected a number, got one on meta");
  check_backed(counter, name);
}

void check_lengths(at::TensorList params, std::initializer_list<std::pair<const char*, at::TensorList>> lists) {
  for (const auto& [name, list] : lists) {
    TORCH_CHECK_VALUE(list.size() == params.size(), name, ": expected ", params.size(), " tensors, one for each of params, got ",
                      list.size());
  }
}

}  // namespace dltrain::bindings
