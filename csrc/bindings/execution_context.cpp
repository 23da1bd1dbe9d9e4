#include "bindings/execution_context.h"

#include <ATen/Parallel.h>
#include <dirent.h>
#include <pthread.h>

#include <atomic>

namespace dltrain::bindings {

namespace {

// In a child of fork() the parent's threads do not exist, and OpenMP would wait for them for ever. If the parent has only one thread,
// OpenMP has not started any yet.
class Threads {
 public:
  Threads() {
    pthread_atfork([] { are_several = count() != 1; }, nullptr, [] { lost = lost || are_several; });
  }
  static bool are_lost() { return lost; }

 private:
  static int count() {
    DIR* const folder = opendir("/proc/self/task");
    if (!folder) return -1;
    int threads = 0;
    while (const dirent* entry = readdir(folder)) threads += entry->d_name[0] != '.';
    closedir(folder);
    return threads;
  }

  static inline thread_local bool are_several = false;
  static inline std::atomic<bool> lost = false;
};

const Threads threads;

}  // namespace

ExecutionContext caller_context(const c10::Device& device) {
  if constexpr (built_with_cuda) {
    if (device.is_cuda()) return cuda_context(device);
  }
  if (Threads::are_lost()) return {serial_for};
  return {[](int64_t n, int64_t grain_size, const Range& body) { at::parallel_for(0, n, grain_size, body); }};
}

OnStream::OnStream(const ExecutionContext& context) {
  if constexpr (built_with_cuda) {
    if (context.on_cuda()) guard_ = cuda_make_current(context);
  }
}

}  // namespace dltrain::bindings
