#include "bindings/comm/options.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "kernels/codec.h"

namespace dltrain::bindings {

namespace {

bool is_one_of(at::ScalarType type, std::initializer_list<at::ScalarType> types) {
  return std::find(types.begin(), types.end(), type) != types.end();
}

// Plans sum in fp32. What that cannot hold is left to the backend's own all-reduce.
bool fits_plans(at::ScalarType type) { return is_one_of(type, {at::kFloat, at::kHalf, at::kBFloat16}); }
bool fits_backend(at::ScalarType type) {
  return fits_plans(type) || is_one_of(type, {at::kDouble, at::kByte, at::kChar, at::kInt, at::kLong});
}

void check_lies(const at::Tensor& tensor, const std::string& name, const c10::Device& device) {
  check_plain(tensor, name);
  TORCH_CHECK_VALUE(tensor.device() == device, name, ": expected a tensor on ", device.is_cpu() ? "the CPU" : device.str(), ", got one on ",
                    tensor.device());
  check_backed(tensor, name);
}

// Of an all-reduce.
void check_values(const at::Tensor& tensor, const c10::Device& device, const AllReduceOptions& options) {
  check_lies(tensor, "tensor", device);
  const at::ScalarType type = tensor.scalar_type();
  if (options.is_native(type)) {
    TORCH_CHECK_TYPE(fits_backend(type), "tensor: expected dtype float32, float16, bfloat16, float64, uint8, int8, int32 or int64, got ",
                     type);
    TORCH_CHECK_TYPE(!options.call.average || at::isFloatingType(type), "tensor: expected a floating dtype for op 'avg', got ", type);
  } else {
    TORCH_CHECK_TYPE(fits_plans(type), "tensor: expected dtype float32, float16 or bfloat16 for the algorithm ", options.call.algorithm,
                     " and the codec ", options.call.codec, " (others are for the algorithms auto and native with the codec raw), got ",
                     type);
  }
  check_written(tensor, "tensor");
}

// Of a reduce-scatter, which only reads its input.
void check_share(const at::Tensor& share, const at::Tensor& input, const c10::Device& device, const AllReduceOptions& options,
                 int world_size) {
  check_lies(share, "output", device);
  check_lies(input, "input", device);
  TORCH_CHECK_TYPE(fits_plans(input.scalar_type()), "input: expected dtype float32, float16 or bfloat16, got ", input.scalar_type());
  TORCH_CHECK_TYPE(share.scalar_type() == input.scalar_type(), "output: expected the dtype of input, ", input.scalar_type(), ", got ",
                   share.scalar_type());
  TORCH_CHECK_VALUE(input.numel() == share.numel() * world_size, "input: expected ", world_size, " times as many elements as output, ",
                    share.numel() * world_size, ", got ", input.numel());
  check_written(share, "output");
  std::vector<Argument> apart = {{share, "output", true}, {input, "input", true}};
  if (options.feedback.residual) apart.push_back({*options.feedback.residual, "residual", true});
  check_apart(apart);
}

void check_feedback_of(const at::Tensor& tensor, const AllReduceOptions& options) {
  if (options.bucket) {
    TORCH_CHECK_TYPE(fits_plans(tensor.scalar_type()), "bucket: expected dtype float32, float16 or bfloat16, got ", tensor.scalar_type());
    options.bucket->check(tensor);
  }
  options.feedback.check(tensor);
  if (options.feedback.residual) {
    TORCH_CHECK_VALUE(!options.is_native(tensor.scalar_type()), "residual: expected none for the algorithm native");
    check_feedback(find_codec(options.call.codec), options.call.stochastic);
  }
}

}  // namespace

bool AllReduceOptions::is_native(at::ScalarType type) const {
  return call.algorithm == "native" || (call.algorithm == "auto" && call.codec == "raw" && !fits_plans(type));
}

void AllReduceOptions::check(const at::Tensor& tensor, const c10::Device& device, int world_size) const {
  comm::check_names(call.algorithm, call.codec);
  if (share) {
    check_share(*share, tensor, device, *this, world_size);
  } else {
    check_values(tensor, device, *this);
  }
  check_feedback_of(tensor, *this);
}

void AllReduceOptions::changed(const at::Tensor& tensor) const {
  bindings::changed({{share.value_or(tensor), share ? "output" : "tensor", true}});
  for (const auto* written : {&feedback.residual, &feedback.spare}) {
    if (*written) bindings::changed({{**written, "residual", true}});
  }
}

}  // namespace dltrain::bindings
