#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>

#include "comm/executor.h"
#include "core/queue.h"

namespace dltrain::bindings {

// All-reduces over one backend of their own, one after another in the order of the calls.
class Communicator {
 public:
  Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::vector<int> global_ranks, std::chrono::milliseconds timeout);
  ~Communicator();

  // In place, in the calling thread when nothing is under way.
  void all_reduce(const at::Tensor& tensor, const std::string& algorithm, const std::string& codec, bool average);

  // The same by the worker. The future's value is the tensor.
  std::shared_ptr<torch::jit::PythonFutureWrapper> submit(py::object tensor, const std::string& algorithm, const std::string& codec,
                                                          bool average);

  // Aborts what is under way and fails what waits. Does not block on any peer.
  void close();

  comm::Stats stats() const { return executor_->stats(); }

 private:
  comm::AllReduce call(const std::string& algorithm, const std::string& codec, bool average) const;

  std::shared_ptr<comm::Executor> executor_;  // shared with the tasks: one of them may drop the communicator
  std::chrono::milliseconds timeout_;
  Queue queue_;
};

}  // namespace dltrain::bindings
