#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <vector>

#include "bindings/comm/c10d_transport.h"
#include "comm/run/executor.h"
#include "comm/transport/shm/group.h"

namespace dltrain::bindings {

// Connected ranks and their executor: all ranks of a group or, in two levels, those of this host, or those that have the same shard.
class Level {
 public:
  // Over a torch.distributed backend that nothing else uses: Gloo on the CPU, NCCL on a CUDA device.
  static std::shared_ptr<Level> over_backend(c10::intrusive_ptr<c10d::Backend> backend, const c10::Device& device,
                                             std::vector<int> global_ranks);
  // Through memory that all ranks have opened. processes: the number of each rank's process. gloo: for native all-reduces.
  static std::shared_ptr<Level> over_shared_memory(std::shared_ptr<comm::shm::Group> group, int rank, const std::vector<int>& processes,
                                                   c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int> global_ranks);
  // Over a communicator of NCCL. A collective call: all ranks have to call it with the same id.
  static std::shared_ptr<Level> over_nccl(const std::string& unique_id, int rank, const c10::Device& device, std::vector<int> global_ranks,
                                          std::chrono::milliseconds timeout);

  comm::Executor& executor() { return executor_; }

  // The all-reduce of the backend itself, in place.
  void all_reduce_natively(const ExecutionContext& context, const at::Tensor& tensor, bool average, std::chrono::milliseconds timeout);

 private:
  Level(std::unique_ptr<comm::Transport> transport, std::vector<int> global_ranks, C10dTransport* gloo = nullptr)
      : gloo_(gloo), executor_(std::move(transport), std::move(global_ranks)) {}
  void all_reduce_by_gloo(at::Tensor tensor, bool average, std::chrono::milliseconds timeout);

  C10dTransport* const gloo_;  // for native all-reduces on the CPU; owned by the executor
  comm::Executor executor_;
};

}  // namespace dltrain::bindings
