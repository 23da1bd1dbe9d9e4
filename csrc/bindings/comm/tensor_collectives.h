#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "bindings/comm/level.h"
#include "bindings/comm/options.h"
#include "comm/run/communicator.h"
#include "core/span.h"

namespace dltrain::bindings {

// The ranks of a communicator, as they are reported to the profiler.
struct Ranks {
  std::string name, description;
  std::vector<int> ranks;  // global ranks
  int rank;                // the index of this rank in `ranks`
};

// The collectives of comm over tensors: over the memory of dense tensors, and over dense copies of other tensors.
class TensorCollectives {
 public:
  // inside: null if there is one level. control: connects all ranks; null if there is one. measures: whether "auto" may measure times.
  TensorCollectives(std::shared_ptr<Level> across, std::shared_ptr<Level> inside, const comm::Hosts& hosts,
                    c10::intrusive_ptr<c10d::Backend> control, Ranks members, std::chrono::milliseconds timeout,
                    const comm::AdaptiveTimeout& answer_timeout, bool measures);

  comm::Communicator& group() { return group_; }

  // Sums over all calls. bus_bytes: the bytes of the tensors times what nccl-tests multiply a bandwidth with, for the "bus bandwidth".
  struct Work {
    std::atomic<int64_t> nanoseconds = 0;  // on the CPU
    std::atomic<int64_t> tensor_bytes = 0, bus_bytes = 0;
  };
  const Work& done() const { return done_; }

  // Throws torch.distributed.DistBackendError for errors that concern other ranks.
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
  Work done_;
  comm::Communicator group_;
};

}  // namespace dltrain::bindings
