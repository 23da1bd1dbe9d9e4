#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>

#include "bindings/comm/options.h"
#include "bindings/comm/tensor_collectives.h"
#include "bindings/execution_context.h"
#include "core/cuda/stream_queue.h"
#include "core/queue.h"

namespace dltrain::bindings {

// Collectives over tensors on one device, one after another in the order of the calls. They run in one level of all ranks or, for
// all-reduces, in two levels: within a host and between hosts.
class Communicator {
 public:
  Communicator(std::shared_ptr<TensorCollectives> work, const c10::Device& device);
  ~Communicator();

  // On the CPU it runs in the calling thread if no other call is in progress. On a CUDA device it runs in the order of the current stream.
  void run(const at::Tensor& tensor, const CollectiveOptions& options);

  // The same, but the worker runs it or, on a CUDA device, a stream of its own. The future's value is, for a bucket, the tensor that is
  // written, as a DDP hook returns it, and otherwise a list of that tensor, as in c10d.
  std::shared_ptr<torch::jit::PythonFutureWrapper> submit(py::object tensor, const CollectiveOptions& options);

  // Returns when the submitted work is done, or has failed. Throws DistBackendError after `timeout` seconds; the work then continues.
  void wait(const torch::jit::PythonFutureWrapper& future, std::optional<double> timeout);

  // Aborts the call in progress, and makes the waiting calls fail. Does not wait for any peer.
  void close();

  // Whether this process was forked from the one that made this object. Then it has neither the threads nor connections of its own.
  bool is_forked() const { return getpid() != process_; }

  // The global rank that is responsible for the failure; nothing if there is none, or it is not known.
  std::optional<int> culprit() const;
  int64_t segment_bytes() const;  // the size of segments that suits the transport; 0: that of a network

  // Returns when the work that was enqueued on a CUDA device is done, or has failed, and why calls fail; empty while they do not.
  std::string drain();

  struct Stats {
    int64_t calls, wire_bytes, inside_bytes;  // sent by this rank
    double seconds;                           // see TensorCollectives::Work
    int64_t tensor_bytes, bus_bytes;
  };
  Stats stats() const;

 private:
  void check(const at::Tensor& tensor, const CollectiveOptions& options) const;
  // Runs it in this thread, and tells the bucket how long it waited and took.
  static void work(TensorCollectives& by, const ExecutionContext& context, const at::Tensor& tensor, const CollectiveOptions& options,
                   Clock::time_point submitted);
  void run_without_gil(const at::Tensor& tensor, const CollectiveOptions& options);

  // Gives a call to the queue. Throws DistBackendError if another thread has closed it since check().
  void give(const std::function<void(Queue&)>& call);

  // Runs `wait` without the GIL. Ctrl-C closes the communicator, which ends the wait.
  void interruptibly(const std::function<void()>& wait);

  const c10::Device device_;
  const pid_t process_ = getpid();
  std::shared_ptr<TensorCollectives> work_;  // shared with the tasks: a task may drop the last reference to the communicator
  std::unique_ptr<Queue> queue_ = std::make_unique<Queue>();
  std::shared_ptr<cuda::StreamQueue> stream_queue_;  // used instead of queue_ on a CUDA device
};

}  // namespace dltrain::bindings
