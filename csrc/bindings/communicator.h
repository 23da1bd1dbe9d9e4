#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/c10d_transport.h"
#include "comm/executor.h"
#include "core/queue.h"

namespace dltrain::bindings {

struct AllReduceOptions {
  comm::AllReduce call;  // but for its residual and its timeout
  std::optional<at::Tensor> residual;

  // Whether the backend's own all-reduce is asked for, or is the only one for elements of this type.
  bool is_native(at::ScalarType type) const;
};

// All-reduces over one backend of their own, one after another in the order of the calls.
class Communicator {
 public:
  Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::vector<int> global_ranks, std::chrono::milliseconds timeout);
  ~Communicator();

  // In place, in the calling thread when nothing is under way.
  void all_reduce(const at::Tensor& tensor, const AllReduceOptions& options);

  // The same by the worker. The future's value is the tensor.
  std::shared_ptr<torch::jit::PythonFutureWrapper> submit(py::object tensor, const AllReduceOptions& options);

  // Aborts what is under way and fails what waits. Does not block on any peer.
  void close();

  comm::Stats stats() const { return work_->executor.stats(); }

 private:
  struct Work {
    Work(std::unique_ptr<C10dTransport> transport, std::vector<int> global_ranks, std::chrono::milliseconds timeout);
    void all_reduce(const Place& place, const at::Tensor& tensor, const AllReduceOptions& options);
    void all_reduce_natively(at::Tensor tensor, bool average);

    C10dTransport& connections;  // the executor's
    comm::Executor executor;
    std::chrono::milliseconds timeout;
  };

  void check(const at::Tensor& tensor, const AllReduceOptions& options) const;

  std::shared_ptr<Work> work_;  // shared with the tasks: one of them may drop the communicator
  Queue queue_;
};

}  // namespace dltrain::bindings
