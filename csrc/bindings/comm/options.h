#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "bindings/comm/bucket.h"
#include "comm/run/executor.h"

namespace dltrain::bindings {

// What a collective is to do with one tensor.
struct CollectiveOptions {
  comm::CallOptions call;           // but for what tensors and buckets hold, and its timeout
  std::optional<at::Tensor> shard;  // this rank's, where each has one: of a reduce-scatter it is written, of an all-gather read
  std::vector<int64_t> sizes;       // of the shares, by rank; where there are none, as many elements for each
  FeedbackTensors feedback;
  std::shared_ptr<BucketState> bucket;

  // Whether the backend's own all-reduce is asked for, or is the only one for elements of this type.
  bool is_native(at::ScalarType type) const;
  // Whether elements are carried as they are, of whatever type.
  bool is_verbatim() const { return !comm::adds_up(call.collective) && call.codec == "raw" && !feedback.residual; }

  // What is written.
  const at::Tensor& result(const at::Tensor& tensor) const { return call.collective == comm::Collective::reduce_scatter ? *shard : tensor; }
  std::vector<Span> shards(int64_t numel, int world_size) const;

  // That they go with the tensor, on that device.
  void check(const at::Tensor& tensor, const c10::Device& device, int rank, int world_size) const;

  // Tells autograd what the call writes.
  void changed(const at::Tensor& tensor) const;

 private:
  void check_shares(const at::Tensor& tensor, const c10::Device& device, int rank, int world_size) const;
};

}  // namespace dltrain::bindings
