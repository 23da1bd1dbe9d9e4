#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <optional>

#include "bindings/level.h"
#include "bindings/place.h"
#include "core/cuda/stream_queue.h"
#include "core/queue.h"

namespace dltrain::bindings {

struct AllReduceOptions {
  comm::AllReduce call;  // but for its residual and its timeout
  std::optional<at::Tensor> residual;

  // Whether the backend's own all-reduce is asked for, or is the only one for elements of this type.
  bool is_native(at::ScalarType type) const;
};

// All-reduces of tensors on one device, one after another in the order of the calls: over all ranks at once or, with levels inside and
// across the hosts, in two. Inside, the ranks of a host add up and share out; across, each host's part of a share goes by a plan and a
// codec; and inside again all get all shares. So a link carries what one rank of a host would send, and not what all of them would.
//
//   host 0   rank 0  a a b b            aa .. --- across ---> AA ..            AA BB
//            rank 1  a a b b  --inside-> .. bb --- across ---> .. BB  --inside-> AA BB
class Communicator {
 public:
  Communicator(std::shared_ptr<Level> across, std::shared_ptr<Level> inside, const c10::Device& device, std::chrono::milliseconds timeout);
  ~Communicator();

  // In place: on the CPU in the calling thread, when nothing is under way; on a CUDA device in the order of the current stream.
  void all_reduce(const at::Tensor& tensor, const AllReduceOptions& options);

  // The same by the worker or, on a CUDA device, on a stream of its own. The future's value is the tensor.
  std::shared_ptr<torch::jit::PythonFutureWrapper> submit(py::object tensor, const AllReduceOptions& options);

  // Aborts what is under way and fails what waits. Does not block on any peer.
  void close();

  // Returns when what was enqueued on a CUDA device is done, or has failed.
  void drain();

  comm::Stats across() const { return work_->across->executor().stats(); }
  comm::Stats inside() const { return work_->inside ? work_->inside->executor().stats() : comm::Stats{}; }

 private:
  struct Work {
    void all_reduce(const Place& place, const at::Tensor& tensor, const AllReduceOptions& options);
    void all_reduce_natively(const Place& place, const at::Tensor& tensor, bool average);
    void all_reduce_in_two_levels(const Place& place, const at::Tensor& tensor, comm::AllReduce call);
    std::string failure() const;
    void abort(const std::string& reason);
    void close();

    std::shared_ptr<Level> across, inside;  // inside: null where there is one level
    std::chrono::milliseconds timeout;
  };

  void check(const at::Tensor& tensor, const AllReduceOptions& options) const;

  const c10::Device device_;
  std::shared_ptr<Work> work_;  // shared with the tasks: one of them may drop the communicator
  Queue queue_;
  std::shared_ptr<cuda::StreamQueue> stream_queue_;  // in its place on a CUDA device
};

}  // namespace dltrain::bindings
