#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "bindings/optim/updates.h"
#include "core/cache_line.h"

namespace dltrain::bindings {

// The prefetch hints of a group: the addresses of the tensors of each parameter in the last step. Reading a parameter follows a chain of
// pointers with a cache miss each; prefetching the next parameters lets the misses overlap. A wrong address costs only its prefetch.
template <size_t keys>
class Prefetcher {
 public:
  void resize(size_t parameters) { addresses_.resize(parameters, {}); }

  // Always inlined, because GCC treats a function that only prefetches as one without effects, and removes its calls.
  __attribute__((always_inline)) void fetch(size_t index) const {
    for (const Address& address : addresses_[index]) {
      if (!address.impl) return;
      __builtin_prefetch(address.tensor);
      for (size_t at = 0; at < sizeof(c10::TensorImpl); at += cache_line) __builtin_prefetch(address.impl + at);
      for (size_t at = 0; at < sizeof(c10::StorageImpl); at += cache_line) __builtin_prefetch(address.storage + at);
    }
  }

  void note(size_t index, const Reading<keys>& reading) {
    size_t next = 0;
    const auto note = [&](const at::Tensor* tensor) {
      if (!tensor) return;
      const c10::TensorImpl* const impl = tensor->unsafeGetTensorImpl();
      addresses_[index][next++] = {address(tensor), address(impl), address(impl->unsafe_storage().unsafeGetStorageImpl())};
    };
    note(reading.param);
    note(reading.grad);
    for (const at::Tensor* const value : reading.values) note(value);
    note(reading.master);
    if (next < most) addresses_[index][next] = {};
  }

 private:
  static constexpr size_t most = keys + 3;  // tensors of a parameter
  struct Address {
    const char *tensor, *impl, *storage;
  };

  static const char* address(const void* object) { return static_cast<const char*>(object); }

  std::vector<std::array<Address, most>> addresses_;
};

}  // namespace dltrain::bindings
