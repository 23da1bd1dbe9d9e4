#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "bindings/comm/bucket.h"
#include "comm/run/executor.h"

namespace dltrain::bindings {

// The options of a collective over one tensor.
struct CollectiveOptions {
  comm::CallOptions call;           // without its timeout and what depends on the tensors and the bucket
  std::optional<at::Tensor> shard;  // this rank's shard: written by a reduce-scatter, read by an all-gather; or these are in place
  std::vector<int64_t> sizes;       // elements of each rank's shard; if empty, all shards have the same size
  FeedbackTensors feedback;
  std::shared_ptr<BucketState> bucket;
  std::vector<at::Tensor> minus;      // by region of the bucket, are subtracted from it; if empty, nothing is
  std::optional<at::Tensor> message;  // if given, the result is written there, encoded, and the tensor does not change

  // Whether the backend's own all-reduce is used: it was selected by name, or is the only one for this type.
  bool is_native(at::ScalarType type) const;
  // Whether elements are sent unchanged, whatever their type is.
  bool is_verbatim() const { return !comm::adds_up(call.collective) && call.codec == "raw" && !feedback.residual && !bucket; }

  // The tensor that is written.
  const at::Tensor& result(const at::Tensor& tensor) const {
    return call.collective == comm::Collective::reduce_scatter && shard ? *shard : tensor;
  }
  std::vector<Span> shards(int64_t numel, int world_size) const;

  // Throws unless the options are valid for this tensor, device and rank.
  void check(const at::Tensor& tensor, const c10::Device& device, int rank, int world_size) const;

  // Increments the versions of the tensors that the call writes, for autograd.
  void changed(const at::Tensor& tensor) const;

 private:
  void check_difference(const at::Tensor& tensor, const c10::Device& device, int world_size) const;
  void check_shards(const at::Tensor& tensor, const c10::Device& device, int rank, int world_size) const;
};

}  // namespace dltrain::bindings
