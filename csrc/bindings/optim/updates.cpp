#include "bindings/optim/updates.h"

namespace dltrain::bindings {

void refuse(const at::Tensor& tensor, const char* name, int64_t index, const at::Tensor& param, bool may_be_half) {
  check_plain(tensor, c10::str(name, "[", index, "]"));
  TORCH_CHECK_VALUE(is_supported(param.device()), name, "[", index, "]: expected a tensor on ", supported_devices(), ", got one on ",
                    tensor.device());
  TORCH_CHECK_VALUE(tensor.device() == param.device(), name, "[", index, "]: expected a tensor on ", param.device(), " as params[", index,
                    "], got one on ", tensor.device());
  TORCH_CHECK_TYPE(detail::has_type(*tensor.unsafeGetTensorImpl(), may_be_half), name, "[", index, "]: expected dtype float32",
                   may_be_half ? ", float16 or bfloat16" : "", ", got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.sizes() == param.sizes(), name, "[", index, "]: expected shape ", param.sizes(), " of params[", index, "], got ",
                    tensor.sizes());
  check_backed(tensor, c10::str(name, "[", index, "]"));
  TORCH_INTERNAL_ASSERT(false);
}

void check_step(const at::Tensor& step, int64_t index, const at::Tensor& param) {
  const std::string name = c10::str("steps[", index, "]");
  check_plain(step, name);
  TORCH_CHECK_TYPE(detail::counts(step, param), name, ": expected one float32 number on ", param.device(), ", got ", step.toString(),
                   " of shape ", step.sizes());
  check_backed(step, name);
}

void check_foreign_step(const at::Tensor& step, int64_t index) {
  const std::string name = c10::str("steps[", index, "]");
  check_plain(step, name);
  const at::ScalarType type = step.scalar_type();
  TORCH_CHECK_TYPE((at::isFloatingType(type) || at::isIntegralType(type, /*includeBool=*/false)) && step.numel() == 1, name,
                   ": expected one number, got ", step.toString(), " of shape ", step.sizes());
  TORCH_CHECK_VALUE(!step.is_meta(), name, ": expected a number, got one on meta");
  check_backed(step, name);
}

void check_lengths(at::TensorList params, std::initializer_list<std::pair<const char*, at::TensorList>> lists) {
  for (const auto& [name, list] : lists) {
    TORCH_CHECK_VALUE(list.size() == params.size(), name, ": expected ", params.size(), " tensors, one for each of params, got ",
                      list.size());
  }
}

StepArguments::StepArguments(double lr, bool maximize, std::optional<at::Tensor> tensor_lr, std::optional<at::Tensor> grad_scale,
                             std::optional<at::Tensor> found_inf)
    : lr_(lr), maximize_(maximize), tensor_lr_(std::move(tensor_lr)), grad_scale_(std::move(grad_scale)), found_inf_(std::move(found_inf)) {
  for (const auto& [name, tensor] : {std::pair{"lr", &tensor_lr_}, {"grad_scale", &grad_scale_}, {"found_inf", &found_inf_}}) {
    if (!*tensor) continue;
    check_plain(**tensor, name);
    TORCH_CHECK_VALUE((*tensor)->numel() == 1, name, ": expected a tensor of one number, got shape ", (*tensor)->sizes());
    TORCH_CHECK_VALUE(is_supported((*tensor)->device()), name, ": expected a tensor on ", supported_devices(), ", got one on ",
                      (*tensor)->device());
    TORCH_CHECK_TYPE(!(*tensor)->is_complex(), name, ": expected a real number, got ", (*tensor)->toString());
    check_backed(**tensor, name);
  }
}

template <class T>
const T* StepArguments::number(const std::optional<at::Tensor>& given, const at::Device& device) {
  if (!given) return nullptr;
  const at::ScalarType type = c10::CppTypeToScalarType<T>::value;
  return brought_.emplace_back(given->detach().to(device, type, /*non_blocking=*/device.is_cuda())).template const_data_ptr<T>();
}

Step StepArguments::on(const at::Device& device) {
  return {lr_, maximize_, {number<float>(tensor_lr_, device), number<double>(grad_scale_, device), number<float>(found_inf_, device)}};
}

}  // namespace dltrain::bindings
