#include "comm/transport/shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/transport/transport.h"
#include "core/check.h"

namespace dltrain::comm::shm {

namespace {

[[noreturn]] void fail(const std::string& what, int error) { throw TransportError(text(what, ": ", std::strerror(error))); }

}  // namespace

Memory::Memory(int64_t bytes) : descriptor_(memfd_create("dltrain_ext", MFD_CLOEXEC)) {
  if (descriptor_ < 0) fail("no memory for other processes could be made", errno);
  // The pages are provided now, because a process that writes to a page for which there is no memory is killed.
  if (const int error = posix_fallocate(descriptor_, 0, bytes)) {
    close();
    fail(text(bytes, " bytes for other processes could not be allocated"), error);
  }
  map(bytes);
}

Memory::Memory(const std::string& address, int64_t bytes) : descriptor_(open(address.c_str(), O_RDWR | O_CLOEXEC)) {
  if (descriptor_ < 0) fail(text("the memory of another process, ", address, ", could not be opened"), errno);
  struct stat found{};
  if (fstat(descriptor_, &found) != 0 || found.st_size != bytes) {
    close();
    throw TransportError(text(address, ": expected memory of ", bytes, " bytes, got ", found.st_size));
  }
  map(bytes);
}

Memory::~Memory() {
  munmap(data_, static_cast<size_t>(bytes_));
  close();
}

std::string Memory::address() const { return text("/proc/", getpid(), "/fd/", descriptor_); }

void Memory::close() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

void Memory::map(int64_t bytes) {
  void* const mapped = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    close();
    fail(text(bytes, " bytes for other processes could not be mapped"), error);
  }
  data_ = static_cast<std::byte*>(mapped);
  bytes_ = bytes;
}

Ring::Ring(const Memory& memory, int64_t first, int64_t size) : size_(size) {
  const auto length = static_cast<size_t>(size);
  void* const place = mmap(nullptr, 2 * length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) fail(text(size, " bytes for other processes could not be mapped"), errno);
  data_ = static_cast<std::byte*>(place);
  for (std::byte* const half : {data_, data_ + size}) {
    if (mmap(half, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.descriptor_, first) != MAP_FAILED) continue;
    const int error = errno;
    munmap(data_, 2 * length);
    fail(text(size, " bytes for other processes could not be mapped"), error);
  }
}

Ring::~Ring() {
  if (data_) munmap(data_, 2 * static_cast<size_t>(size_));
}

int64_t page_size() { return sysconf(_SC_PAGESIZE); }

}  // namespace dltrain::comm::shm
