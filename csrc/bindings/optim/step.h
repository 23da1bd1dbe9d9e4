#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "core/tensor_list.h"
#include "kernels/scalars.h"

namespace dltrain::bindings {

// The arguments of a step other than the tensors of its parameters. Numbers that are tensors are read on the device of the parameters, or
// copied to it without waiting.
class StepArguments {
 public:
  StepArguments(double lr, bool maximize, std::optional<at::Tensor> tensor_lr, std::optional<at::Tensor> grad_scale,
                std::optional<at::Tensor> found_inf, int64_t seed = 0, std::optional<at::Tensor> rounding_step = {});
  Step on(const at::Device& device);

 private:
  template <class T>
  const T* number(const std::optional<at::Tensor>& given, const at::Device& device);

  double lr_;
  bool maximize_;
  std::optional<at::Tensor> tensor_lr_, grad_scale_, found_inf_, rounding_step_;
  uint64_t seed_;
  std::vector<at::Tensor> converted_;
};

// The gradients of one or several fused steps, by device.
class Gradients {
 public:
  struct OnDevice {
    at::Device device;
    std::vector<TensorList<1>> lists;
  };

  std::vector<TensorList<1>>& on(const at::Device& device) {
    for (OnDevice& one : devices_) {
      if (one.device == device) return one.lists;
    }
    return devices_.emplace_back(OnDevice{device, {}}).lists;
  }
  auto begin() const { return devices_.begin(); }
  auto end() const { return devices_.end(); }

 private:
  std::vector<OnDevice> devices_;
};

// The sum of squares of all gradients on the device, as a float64 tensor.
at::Tensor sum_squares_on(const at::Device& device, const std::vector<TensorList<1>>& grads);

}  // namespace dltrain::bindings
