#include "comm/transport/shm/processes.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include "comm/transport/transport.h"
#include "core/check.h"

namespace dltrain::comm::shm {

class Processes::Process {
 public:
  explicit Process(int number) : descriptor_(static_cast<int>(syscall(SYS_pidfd_open, number, 0))) {
    if (descriptor_ < 0) throw TransportError(text("process ", number, " cannot be observed: ", std::strerror(errno)));
  }
  ~Process() { close(descriptor_); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool is_alive() const {
    pollfd ended{descriptor_, POLLIN, 0};
    return poll(&ended, 1, 0) == 0;
  }

 private:
  const int descriptor_;  // is closed when another program is executed
};

Processes::Processes(const std::vector<int>& numbers) {
  for (const int number : numbers) processes_.push_back(shared(number));
}

bool Processes::is_alive(int index) const { return processes_[index]->is_alive(); }

// All groups of this process share the descriptors. The number of a process that has ended may be given to another one.
std::shared_ptr<Processes::Process> Processes::shared(int number) {
  static std::mutex guards;
  static auto* const observed = new std::map<int, std::weak_ptr<Process>>;  // outlives every thread
  const std::lock_guard lock(guards);
  std::weak_ptr<Process>& known = (*observed)[number];
  std::shared_ptr<Process> process = known.lock();
  if (!process || !process->is_alive()) known = process = std::make_shared<Process>(number);
  return process;
}

}  // namespace dltrain::comm::shm
