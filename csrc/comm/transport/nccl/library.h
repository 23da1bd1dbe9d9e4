#pragma once

#include <string>

#include "comm/transport/nccl/api.h"

namespace dltrain::comm::nccl {

// The NCCL of this process, which is found at run time.
class Library {
 public:
  // The NCCL that is loaded already (usually torch's), or else the system's; the environment variable DLTRAIN_NCCL names another one.
  // Throws std::runtime_error, which says why there is none or that it is too old.
  static const Library& get();
  explicit Library(const std::string& path);  // without a folder, the dynamic loader searches for it

  const Api* operator->() const { return &api_; }
  int version() const { return version_; }  // 22809: 2.28.9
  std::string version_text() const;

  // "ncclSend: unhandled cuda error (...)"
  std::string describe(const char* what, Result result, Comm comm = nullptr) const;

 private:
  Api api_;
  int version_ = 0;
};

}  // namespace dltrain::comm::nccl
