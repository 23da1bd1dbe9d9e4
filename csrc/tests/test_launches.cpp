// How many kernels a bucket takes on a device, where each launch costs some microseconds of the host's and the device's time.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "comm/choice.h"
#include "comm/program.h"
#include "tests/nccl_ranks.h"
#ifdef DLTRAIN_EMULATED
#include <cuda_runtime.h>
#endif

namespace dltrain::comm {
namespace {

constexpr int world_size = 8;

struct Launches {
  int in_all = 0, of_a_part = 0;  // at most
};

// As Work gives them to map_blocks: one for each codec, of up to 64 regions.
template <class Step>
int launches_of(const std::vector<Step>& steps) {
  std::map<const Codec*, int> regions;
  for (const Step& step : steps) ++regions[step.region.codec];
  int launches = 0;
  for (const auto& [codec, count] : regions) launches += (count + 63) / 64;
  return launches;
}

Launches launches_of(const Program& program) {
  Launches found;
  for (const auto& tick : program.ticks) {
    for (const Part& part : tick) {
      const int launches = launches_of(part.sums) + launches_of(part.decodes);
      found.in_all += launches;
      found.of_a_part = std::max(found.of_a_part, launches);
    }
  }
  return found;
}

// The hook's: parameters of one dimension, and small ones, are raw.
Layout bucket(const std::vector<int64_t>& parameters) {
  Layout layout;
  int64_t first = 0, number = 0;
  for (const int64_t numel : parameters) {
    layout.push_back({{first, numel}, &find_codec(numel < 10'000 ? "raw" : "int8"), number});
    first += numel;
    number += (numel + 3) / 4 * 4;
  }
  return layout;
}

std::map<std::string, Layout> buckets() {  // of about 25 MiB
  constexpr int64_t d = 768;
  std::vector<int64_t> resnet;
  for (int block = 0; block < 6; ++block) {
    for (const int64_t numel : {1024 * 256, 256, 256, 256 * 256 * 9, 256, 256, 256 * 1024, 1024, 1024}) resnet.push_back(numel);
  }
  return {{"one parameter", bucket({6'553'600})},
          {"a layer of GPT-2", bucket({d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d})},
          {"a stage of ResNet-50", bucket(resnet)}};
}

Program program_of(const Layout& layout, const std::string& algorithm, int rank, int ranks, int segments) {
  return lower(make_plan(algorithm, rank, ranks), cut_by_region(layout, segments), Result::values);
}

// By `direct`, which the hook takes on a device. Before regions were launched together it took 237 for a layer of GPT-2, and the ring 497
// for a stage of ResNet-50.
TEST(Launches, AreFewWhateverTheParameters) {
  const Codec& int8 = find_codec("int8");
  const std::map<std::string, int> at_most = {{"one parameter", 9}, {"a layer of GPT-2", 14}, {"a stage of ResNet-50", 18}};
  for (const auto& [name, layout] : buckets()) {
    const int64_t bytes = message_bytes(layout);
    const int segments = choose("direct", 0, world_size, bytes, int8, bytes).segments;
    const Launches direct = launches_of(program_of(layout, "direct", 3, world_size, segments));
    const Launches ring = launches_of(program_of(layout, "ring", 3, world_size, segments));
    EXPECT_LE(direct.in_all, at_most.at(name)) << name;
    EXPECT_LE(direct.of_a_part, 2) << name;
    EXPECT_LE(ring.in_all, 85) << name;
    EXPECT_LE(ring.of_a_part, 2) << name;
  }
}

#ifdef DLTRAIN_EMULATED

class LaunchesOn : public nccl::OverNccl {};
INSTANTIATE_TEST_SUITE_P(Places, LaunchesOn, testing::Values("cuda"), [](const auto& info) { return info.param; });

TEST_P(LaunchesOn, AreThoseThatTheProgramHas) {
  constexpr int ranks = 2;
  const Layout layout = bucket({20'000, 300, 12'345, 7, 10'000});
  const int64_t numel = layout.back().span.first + layout.back().span.count;
  int expected = 0;
  for (int rank = 0; rank < ranks; ++rank) expected += launches_of(program_of(layout, "direct", rank, ranks, 1)).in_all + 1;  // a NaN's
  const int before = emulated_cuda::launches;
  nccl::on_nccl_ranks(place(), ranks, [&](Executor& executor, Runner& runner, const Place& place) {
    AllReduce call;
    call.algorithm = "direct";
    call.codec = "int8";
    call.segments = 1;
    call.layout = &layout;
    const Array<float> array(place, std::vector<float>(numel, 127.0f));
    runner.all_reduce(executor, {array.data()}, numel, call);
    EXPECT_EQ(array.values(), std::vector<float>(numel, 254.0f));
  });
  EXPECT_EQ(emulated_cuda::launches - before, expected);
}

#endif

}  // namespace
}  // namespace dltrain::comm
