#include "comm/transport/shm/processes.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "comm/transport/transport.h"
#include "core/check.h"

namespace dltrain::comm::shm {

Processes::Processes(const std::vector<int>& numbers) {
  for (const int number : numbers) {
    const auto descriptor = static_cast<int>(syscall(SYS_pidfd_open, number, 0));  // is closed when another program is executed
    if (descriptor < 0) {
      const int error = errno;
      for (const int opened : descriptors_) close(opened);
      throw TransportError(text("process ", number, " cannot be observed: ", std::strerror(error)));
    }
    descriptors_.push_back(descriptor);
  }
}

Processes::~Processes() {
  for (const int descriptor : descriptors_) close(descriptor);
}

bool Processes::is_alive(int index) const {
  pollfd ended{descriptors_[index], POLLIN, 0};
  return poll(&ended, 1, 0) == 0;
}

}  // namespace dltrain::comm::shm
