#pragma once

#include <memory>
#include <vector>

namespace dltrain::comm::shm {

// Says which processes of this host have ended, also when they were killed.
class Processes {
 public:
  // The numbers of processes that live. Throws TransportError if the system cannot observe them.
  explicit Processes(const std::vector<int>& numbers);

  bool is_alive(int index) const;

 private:
  class Process;
  static std::shared_ptr<Process> shared(int number);
  std::vector<std::shared_ptr<Process>> processes_;
};

}  // namespace dltrain::comm::shm
