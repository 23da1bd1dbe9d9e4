// A context takes about half a gigabyte of its device. On a host of several, a rank's threads may make one on the rank's device alone,
// though each of them begins with device 0 as its current one.

#ifdef DLTRAIN_EMULATED

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/places.h"

namespace dltrain {
namespace {

// All the tests of a run work on the last device; this comes after them.
class OnlyOnTheDeviceInUse : public testing::Environment {
 public:
  void TearDown() override { EXPECT_FALSE(emulated_cuda::has_context[0]) << "something was asked of CUDA without a guard"; }
};

[[maybe_unused]] const auto* const registered = testing::AddGlobalTestEnvironment(new OnlyOnTheDeviceInUse);

TEST(Contexts, AGuardGoesBackOnlyToADeviceThatHasOne) {
  std::thread fresh([] {
    int device = 0;
    const bool before = emulated_cuda::has_context[0].exchange(false);
    {
      const cuda::DeviceGuard guard(1);
    }
    cudaGetDevice(&device);
    EXPECT_EQ(device, 1);
    emulated_cuda::has_context[0] = true;
    emulated_cuda::current = 0;
    {
      const cuda::DeviceGuard guard(1);
    }
    cudaGetDevice(&device);
    EXPECT_EQ(device, 0);
    emulated_cuda::has_context[0] = before;
  });
  fresh.join();
}

}  // namespace
}  // namespace dltrain

#endif
