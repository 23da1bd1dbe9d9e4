#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace dltrain::comm::shm {

// Memory that processes of one host share. It has no name in a file system, so nothing is left of it when its last process has ended, in
// whatever way. Throws TransportError.
class Memory {
 public:
  // New memory, which is 0.
  explicit Memory(int64_t bytes);
  // The memory that another process has made. address: see below.
  Memory(const std::string& address, int64_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // What another process of this host needs to open it, until close().
  std::string address() const;
  // No other process can open it any more. Those that have it keep it.
  void close();

  std::byte* data() const { return data_; }

 private:
  void map(int64_t bytes);

  int descriptor_;  // -1 once it is closed
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace dltrain::comm::shm
