// The torch ops that compute what a step needs of all its gradients together.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <map>
#include <tuple>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/execution_context.h"
#include "bindings/optim/step.h"
#include "kernels/map_blocks.h"
#include "kernels/statistics.h"
#include "kernels/unscale_and_clip.h"

namespace dltrain::bindings {

namespace {

// The gradient itself if it has no gaps in memory, since the order of the elements does not matter; otherwise a contiguous copy.
const at::Tensor& without_gaps(const at::Tensor& grad, std::vector<at::Tensor>& kept) {
  return grad.is_non_overlapping_and_dense() ? grad : kept.emplace_back(grad.contiguous());
}

at::Tensor sum_squares_of_tensors(at::TensorList grads) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i = 0; i < grads.size(); ++i) TORCH_CHECK_TYPE(grads[i].defined(), "grads[", i, "]: expected a tensor, got none");
  const at::Device device = grads[0].device();
  std::vector<at::Tensor> kept;
  std::map<Dtype, TensorList<1>> lists;
  for (size_t i = 0; i < grads.size(); ++i) {
    check_floats({grads[i], c10::str("grads[", i, "]")}, device);
    const at::Tensor& grad = without_gaps(grads[i], kept);
    const Dtype dtype = dtype_of(grad);
    lists.try_emplace(dtype, Signature<1>{{dtype}}).first->second.add({const_cast<void*>(grad.const_data_ptr())}, grad.numel());
  }
  std::vector<TensorList<1>> all;
  for (auto& [_, list] : lists) all.push_back(std::move(list));
  return sum_squares_on(device, all);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> unscale_and_clip(const at::Tensor& sum_squares, const std::optional<at::Tensor>& grad_scale,
                                                                const std::optional<at::Tensor>& found_inf,
                                                                std::optional<double> max_norm) {
  TORCH_CHECK_TYPE(sum_squares.defined(), "sum_squares: expected a tensor, got none");
  const at::Device device = sum_squares.device();
  TORCH_CHECK_VALUE(sum_squares.numel() == 1 && sum_squares.scalar_type() == at::kDouble, "sum_squares: expected one float64 number, got ",
                    sum_squares.toString(), " of shape ", sum_squares.sizes());
  check_dense({sum_squares, "sum_squares"}, device);
  const double limit = max_norm.value_or(std::numeric_limits<double>::infinity());
  TORCH_CHECK_VALUE(limit >= 0.0, "max_norm: expected a number of at least 0, got ", limit);
  const auto guard = on_device(device);
  StepArguments arguments(/*lr=*/0.0, /*maximize=*/false, /*tensor_lr=*/std::nullopt, grad_scale, found_inf);
  const auto fresh = [&](at::ScalarType type) { return at::empty({}, at::TensorOptions(device).dtype(type)); };
  const at::Tensor divisor = fresh(at::kDouble), total_norm = fresh(at::kFloat), skip = fresh(at::kFloat);
  map_blocks(caller_context(device), UnscaleAndClip::elements,
             UnscaleAndClip{sum_squares.const_data_ptr<double>(), arguments.on(device).scalars, limit, divisor.mutable_data_ptr<double>(),
                            total_norm.mutable_data_ptr<float>(), skip.mutable_data_ptr<float>()});
  return {divisor, total_norm, skip};
}

TORCH_LIBRARY_FRAGMENT(dltrain_ext, library) {
  library.def("sum_squares(Tensor[] grads) -> Tensor");
  library.def(
      "unscale_and_clip(Tensor sum_squares, *, Tensor? grad_scale=None, Tensor? found_inf=None, float? max_norm=None) "
      "-> (Tensor divisor, Tensor total_norm, Tensor found_inf)");
}

void implement_clipping(torch::Library& library) {
  library.impl("sum_squares", sum_squares_of_tensors);
  library.impl("unscale_and_clip", unscale_and_clip);
}
TORCH_LIBRARY_IMPL(dltrain_ext, CPU, library) { implement_clipping(library); }
TORCH_LIBRARY_IMPL(dltrain_ext, CUDA, library) {
  if constexpr (built_with_cuda) implement_clipping(library);
}

}  // namespace

at::Tensor sum_squares_on(const at::Device& device, const std::vector<TensorList<1>>& grads) {
  const auto guard = on_device(device);
  at::Tensor sum = at::empty({}, at::TensorOptions(device).dtype(at::kDouble));
  sum_squares(caller_context(device), grads, {sum.mutable_data_ptr<double>(), nullptr});
  return sum;
}

}  // namespace dltrain::bindings
