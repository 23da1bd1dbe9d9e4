#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "bindings/comm/bucket.h"
#include "comm/run/executor.h"

namespace dltrain::bindings {

// What an all-reduce or a reduce-scatter of one tensor is to do.
struct AllReduceOptions {
  comm::AllReduce call;             // but for what tensors and buckets hold, and its timeout
  std::optional<at::Tensor> share;  // where given, this rank's share of the sum goes there: a reduce-scatter
  FeedbackTensors feedback;
  std::shared_ptr<Bucket> bucket;

  // Whether the backend's own all-reduce is asked for, or is the only one for elements of this type.
  bool is_native(at::ScalarType type) const;

  // That they go with the tensor, on that device.
  void check(const at::Tensor& tensor, const c10::Device& device, int world_size) const;

  // Tells autograd what the call writes.
  void changed(const at::Tensor& tensor) const;
};

}  // namespace dltrain::bindings
