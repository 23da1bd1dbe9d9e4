#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace dltrain::comm {

// Memory for messages, on a cache-line border. Memory that is released is kept and used again, since the system takes longer to provide the
// pages of a large message than the processor takes to copy it. From any thread; the memory may outlive the pool.
class MessagePool {
 public:
  // kept_bytes: how much memory that nobody uses is kept.
  explicit MessagePool(int64_t kept_bytes);

  // At least so many bytes, which are not initialised. They return to the pool with the last reference.
  std::shared_ptr<std::byte> take(int64_t bytes);

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the memory that is in use
};

}  // namespace dltrain::comm
