#pragma once

// Runs ranks as threads over the fake NCCL.

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/transport/nccl/transport.h"
#include "tests/comm/ranks.h"
#include "tests/contexts.h"
#include "tests/fake_nccl/fake_nccl.h"

namespace dltrain::comm::nccl {

inline const Library& fake_library() {
  static const Library library(DLT_FAKE_NCCL);
  return library;
}

inline const fake_nccl::Controls& fake() {
  static const fake_nccl::Controls& controls = [&]() -> const auto& {
    fake_library();
    void* const library = dlopen(DLT_FAKE_NCCL, RTLD_LAZY | RTLD_NOLOAD);
    return *reinterpret_cast<fake_nccl::GetControls>(dlsym(library, fake_nccl::controls))();
  }();
  return controls;
}

// Returns how many calls begin with this text.
inline int calls(const std::string& beginning) {
  const auto all = fake().calls();
  return static_cast<int>(std::count_if(all.begin(), all.end(), [&](const std::string& call) { return call.starts_with(beginning); }));
}

inline std::string call(int rank, const char* function) { return text("rank ", rank, ": ", function, " "); }

inline void expect_in(const std::string& part, const std::string& whole) { EXPECT_NE(whole.find(part), std::string::npos) << whole; }

// Returns the text of the error that body throws.
template <class Error, class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

class OverNccl : public OnEveryContext {
 protected:
  void SetUp() override {
    OnEveryContext::SetUp();
    if (IsSkipped()) return;
    if (context().on_cuda() && !fake().takes_streams()) GTEST_SKIP() << "the fake NCCL works on no device but the emulated one";
    fake().reset();
  }
  void TearDown() override { EXPECT_EQ(fake().open(), 0) << "communicators were left"; }
};

constexpr std::chrono::seconds generous{60};

// Runs body(transport, context) on world_size ranks, each in a thread with a context of its own.
template <class Body>
void on_transports(const ExecutionContext& kind, int world_size, Body body, std::chrono::milliseconds timeout = generous) {
  const UniqueId id = make_unique_id(fake_library());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const OwnContext own(kind);
      body(std::make_unique<Transport>(fake_library(), id, rank, world_size, kind.device, timeout), own.context());
    });
  }
  for (auto& thread : threads) thread.join();
}

// Runs body(executor, runner, context) on world_size ranks.
template <class Body>
void on_nccl_ranks(const ExecutionContext& kind, int world_size, Body body) {
  on_transports(kind, world_size, [&](std::unique_ptr<Transport> transport, const ExecutionContext& context) {
    Runner runner(context);  // outlives the executor, whose memory is freed on its stream
    Executor executor(std::move(transport));
    body(executor, runner, context);
  });
}

}  // namespace dltrain::comm::nccl
