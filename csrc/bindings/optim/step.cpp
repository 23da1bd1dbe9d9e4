#include "bindings/optim/step.h"

#include <utility>

#include "bindings/arguments.h"

namespace dltrain::bindings {

StepArguments::StepArguments(double lr, bool maximize, std::optional<at::Tensor> tensor_lr, std::optional<at::Tensor> grad_scale,
                             std::optional<at::Tensor> found_inf, int64_t seed, std::optional<at::Tensor> rounding_step)
    : lr_(lr),
      maximize_(maximize),
      tensor_lr_(std::move(tensor_lr)),
      grad_scale_(std::move(grad_scale)),
      found_inf_(std::move(found_inf)),
      rounding_step_(std::move(rounding_step)),
      seed_(static_cast<uint64_t>(seed)) {
  for (const auto& [name, tensor] :
       {std::pair{"lr", &tensor_lr_}, {"grad_scale", &grad_scale_}, {"found_inf", &found_inf_}, {"rounding_step", &rounding_step_}}) {
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
  return converted_.emplace_back(given->detach().to(device, type, /*non_blocking=*/device.is_cuda())).template const_data_ptr<T>();
}

Step StepArguments::on(const at::Device& device) {
  const Scalars scalars{number<float>(tensor_lr_, device), number<double>(grad_scale_, device), number<float>(found_inf_, device),
                        number<int64_t>(rounding_step_, device)};
  return {lr_, maximize_, scalars, seed_};
}

}  // namespace dltrain::bindings
