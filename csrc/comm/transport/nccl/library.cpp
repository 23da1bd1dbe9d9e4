#include "comm/transport/nccl/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>

#include "core/check.h"

namespace dltrain::comm::nccl {

const Library& Library::get() {
  static const Library library = [] {
    const char* const path = std::getenv("DLTRAIN_NCCL");
    return Library(path && *path ? path : "libnccl.so.2");
  }();
  return library;
}

Library::Library(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);  // returns a loaded library of that name if there is one
  if (!library) throw std::runtime_error(text("NCCL cannot be loaded: ", dlerror()));
  const auto find = [&](const char* name) {
    void* const function = dlsym(library, name);
    if (!function) throw std::runtime_error(text("NCCL (", path, ") has no ", name, ": expected version 2.14 or later"));
    return function;
  };
#define DLT_NCCL(theirs, ours, ...) api_.ours = reinterpret_cast<decltype(api_.ours)>(find(#theirs));
  DLT_NCCL_FUNCTIONS(DLT_NCCL)
#undef DLT_NCCL
  const Result result = api_.get_version(&version_);
  if (result != success) throw std::runtime_error(text("NCCL (", path, "): ", describe("ncclGetVersion", result)));
  if (version_ < oldest) throw std::runtime_error(text("NCCL (", path, "): expected version 2.14 or later, got ", version_text()));
}

std::string Library::version_text() const { return text(version_ / 10000, ".", version_ / 100 % 100, ".", version_ % 100); }

std::string Library::describe(const char* what, Result result, Comm comm) const {
  const char* const last = api_.get_last_error(comm);
  return text(what, ": ", api_.get_error_string(result), last && *last ? text(" (", last, ")") : "");
}

}  // namespace dltrain::comm::nccl
