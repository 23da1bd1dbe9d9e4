#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/comm/level.h"
#include "bindings/comm/options.h"
#include "bindings/place.h"
#include "comm/run/two_levels.h"
#include "core/cuda/stream_queue.h"
#include "core/queue.h"

namespace dltrain::bindings {

// The ranks of a communicator, as the profiler is told of them.
struct Ranks {
  std::string name, description;
  std::vector<int> ranks;  // as the world knows them
  int rank;                // this one's place among them
};

// Collectives over tensors on one device, one after another in the order of the calls: over all ranks at once or, all-reduces with levels
// inside and across the hosts, in two.
class Communicator {
 public:
  // inside: null where there is one level. control: of all ranks; null where there is one. measures: whether "auto" may take the time to.
  Communicator(std::shared_ptr<Level> across, std::shared_ptr<Level> inside, const comm::Hosts& hosts,
               c10::intrusive_ptr<c10d::Backend> control, Ranks members, const c10::Device& device, std::chrono::milliseconds timeout,
               const comm::Patience& patience, bool measures);
  ~Communicator();

  // On the CPU in the calling thread, when nothing is under way; on a CUDA device in the order of the current stream.
  void run(const at::Tensor& tensor, const CollectiveOptions& options);

  // The same by the worker or, on a CUDA device, on a stream of its own. The future's value is what has been written.
  std::shared_ptr<torch::jit::PythonFutureWrapper> submit(py::object tensor, const CollectiveOptions& options);

  // Returns when what was submitted is done, or has failed.
  void wait(const torch::jit::PythonFutureWrapper& future);

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
  struct Work {
    Work(std::shared_ptr<Level> across, std::shared_ptr<Level> inside, const comm::Hosts& hosts, c10::intrusive_ptr<c10d::Backend> control,
         Ranks members, std::chrono::milliseconds timeout, const comm::Patience& patience, bool measures);
    ~Work();
    void run(const Place& place, const at::Tensor& tensor, const CollectiveOptions& options);
    void attempt(const Place& place, const at::Tensor& tensor, const CollectiveOptions& options);
    void all_reduce(const Place& place, const at::Tensor& tensor, const CollectiveOptions& options, const comm::Options& call);
    void run_shares(const Place& place, const at::Tensor& tensor, const CollectiveOptions& options, comm::Options& call);
    void carry(const Place& place, const at::Tensor& tensor, std::vector<Span> shares, comm::Options call);
    void run_plan(const Place& place, const at::Tensor& tensor, const comm::Options& call);
    void all_reduce_natively(const Place& place, const at::Tensor& tensor, bool average);
    void all_reduce_in_two_levels(const Place& place, const at::Tensor& tensor, const comm::Options& call);
    std::string failure() const;
    void refuse(const std::string& reason);
    void abort(const std::string& reason);
    void end(const std::string& reason);
    void give_up(const std::string& finding);
    comm::Waiting waiting() const;
    void close();

    const Ranks members;
    std::shared_ptr<Level> across, inside;  // inside: null where there is one level
    const comm::Hosts hosts;
    std::optional<comm::TwoLevels> two_levels;
    const std::chrono::milliseconds timeout;
    const bool measures;
    std::atomic<int64_t> calls = 0;
    std::shared_ptr<comm::Lookout> lookout;  // null where there is one rank
  };

  void check(const at::Tensor& tensor, const CollectiveOptions& options) const;
  void run_without_gil(const at::Tensor& tensor, const CollectiveOptions& options);

  // Without the GIL, and until Ctrl-C, which closes this.
  void interruptibly(const std::function<void()>& wait);

  const c10::Device device_;
  const pid_t process_ = getpid();
  std::shared_ptr<Work> work_;  // shared with the tasks: one of them may drop the communicator
  std::unique_ptr<Queue> queue_ = std::make_unique<Queue>();
  std::shared_ptr<cuda::StreamQueue> stream_queue_;  // in its place on a CUDA device
};

}  // namespace dltrain::bindings
