#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

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
  // Neither other processes nor rings can open it any more. Those that have it keep it.
  void close();

  std::byte* data() const { return data_; }

 private:
  friend class Ring;
  void map(int64_t bytes);

  int descriptor_;  // -1 once it is closed
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

// A part of the memory that is mapped twice in a row: what goes beyond its end and on at its beginning lies in one piece.
class Ring {
 public:
  // In bytes, both multiples of the size of a page.
  Ring(const Memory& memory, int64_t first, int64_t size);
  Ring(Ring&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  Ring& operator=(Ring&&) = delete;
  ~Ring();

  int64_t size() const { return size_; }
  // What a position points to, and `size` bytes behind it.
  std::byte* at(int64_t position) const { return data_ + position % size_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_;
};

int64_t page_size();

}  // namespace dltrain::comm::shm
