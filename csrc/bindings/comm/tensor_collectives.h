#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "bindings/comm/level.h"
#include "bindings/comm/options.h"
#include "comm/run/communicator.h"
#include "core/span.h"

namespace dltrain::bindings {

// The ranks of a communicator, as the profiler is told of them.
struct Ranks {
  std::string name, description;
  std::vector<int> ranks;  // as the world knows them
  int rank;                // this one's place among them
};

// What a communicator does with tensors: the collectives of comm, over the memory of those that are dense, or of what is made of the
// others.
class TensorCollectives {
 public:
  // inside: null where there is one level. control: of all ranks; null where there is one. measures: whether "auto" may take the time to.
  TensorCollectives(std::shared_ptr<Level> across, std::shared_ptr<Level> inside, const comm::Hosts& hosts,
                    c10::intrusive_ptr<c10d::Backend> control, Ranks members, std::chrono::milliseconds timeout,
                    const comm::AdaptiveTimeout& answer_timeout, bool measures);

  comm::Communicator& group() { return group_; }

  // Errors of the peers reach Python as torch.distributed.DistBackendError.
  void run(const ExecutionContext& context, const at::Tensor& tensor, const CollectiveOptions& options);

 private:
  void attempt(const ExecutionContext& context, const at::Tensor& tensor, const CollectiveOptions& options);
  void run_dense(const ExecutionContext& context, const at::Tensor& tensor, const CollectiveOptions& options);
  void run_plan(const ExecutionContext& context, const at::Tensor& tensor, const comm::CallOptions& call);
  void run_shards(const ExecutionContext& context, const at::Tensor& tensor, const CollectiveOptions& options, comm::CallOptions& call);
  void carry(const ExecutionContext& context, const at::Tensor& tensor, std::vector<Span> shards, comm::CallOptions call);
  void all_reduce_natively(const ExecutionContext& context, const at::Tensor& tensor, bool average);
  void all_reduce_in_two_levels(const ExecutionContext& context, const at::Tensor& tensor, const comm::CallOptions& call);

  const Ranks members_;
  const std::shared_ptr<Level> across_, inside_;
  const std::chrono::milliseconds timeout_;
  const bool measures_;
  comm::Communicator group_;
};

}  // namespace dltrain::bindings
