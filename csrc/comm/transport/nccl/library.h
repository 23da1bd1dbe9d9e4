#pragma once

#include <string>

#include "comm/transport/nccl/api.h"

namespace dltrain::comm::nccl {

// NCCL as this process has it, found at run time.
class Library {
 public:
  // The one that is loaded already, torch's as a rule, or the system's; DLTRAIN_NCCL in the environment names another. Throws
  // std::runtime_error that says why there is none, or that it is too old.
  static const Library& get();
  explicit Library(const std::string& path);  // without a folder: searched for as the system does

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
