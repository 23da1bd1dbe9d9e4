#pragma once

#include <vector>

namespace dltrain::comm::shm {

// Says which processes of this host have ended, also when they were killed.
class Processes {
 public:
  // The numbers of processes that live. Throws TransportError if the system cannot observe them.
  explicit Processes(const std::vector<int>& numbers);
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  bool is_alive(int index) const;

 private:
  std::vector<int> descriptors_;
};

}  // namespace dltrain::comm::shm
