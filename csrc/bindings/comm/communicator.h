#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>
#include <unistd.h>

#include <functional>
#include <memory>

#include "bindings/comm/options.h"
#include "bindings/comm/tensor_collectives.h"
#include "bindings/execution_context.h"
#include "core/cuda/stream_queue.h"
#include "core/queue.h"

namespace dltrain::bindings {

// Collectives over tensors on one device, one after another in the order of the calls: over all ranks at once or, all-reduces with levels
// inside and across the hosts, in two.
class Communicator {
 public:
  Communicator(std::shared_ptr<TensorCollectives> work, const c10::Device& device);
  ~Communicator();

  // On the CPU in the calling thread, when nothing is under way; on a CUDA device in the order of the current stream.
  void run(const at::Tensor& tensor, const CollectiveOptions& options);

  // The same by the worker or, on a CUDA device, on a stream of its own. The future's value is the tensor that is written for a bucket,
  // as a DDP hook returns it, and otherwise a list of that tensor, as in c10d.
  std::shared_ptr<torch::jit::PythonFutureWrapper> submit(py::object tensor, const CollectiveOptions& options);

  // Returns when what was submitted is done, or has failed; throws DistBackendError after `timeout` seconds, and the work goes on.
  void wait(const torch::jit::PythonFutureWrapper& future, std::optional<double> timeout);

  // Aborts what is under way and fails what waits. Does not block on any peer.
  void close();

  // Whether this process was forked from the one that made this: it has neither the threads nor connections of its own.
  bool is_forked() const { return getpid() != process_; }

  // Returns when what was enqueued on a CUDA device is done, or has failed.
  void drain();

  struct Stats {
    int64_t calls, wire_bytes, inside_bytes;  // sent by this rank
  };
  Stats stats() const;

 private:
  void check(const at::Tensor& tensor, const CollectiveOptions& options) const;
  void run_without_gil(const at::Tensor& tensor, const CollectiveOptions& options);

  // Without the GIL, and until Ctrl-C, which closes this.
  void interruptibly(const std::function<void()>& wait);

  const c10::Device device_;
  const pid_t process_ = getpid();
  std::shared_ptr<TensorCollectives> work_;  // shared with the tasks: one of them may drop the communicator
  std::unique_ptr<Queue> queue_ = std::make_unique<Queue>();
  std::shared_ptr<cuda::StreamQueue> stream_queue_;  // in its place on a CUDA device
};

}  // namespace dltrain::bindings
