// Counts the kernels that a bucket needs on a device, where each launch costs some microseconds of host and device time.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "comm/program/program.h"
#include "comm/program/selection.h"
#include "tests/comm/nccl_ranks.h"
#ifdef DLTRAIN_EMULATED
#include <cuda_runtime.h>
#endif

namespace dltrain::comm {
namespace {

constexpr int world_size = 8;

// Counts launches as map_blocks groups regions: those of one codec together, as many as the kernel's parameters hold.
class Packing {
 public:
  Packing(int regions, int messages) : regions_(regions), messages_(messages) {}
  void add(const Codec* codec, int messages) {
    Last& last = last_[codec];
    if (last.regions == 0 || last.regions == regions_ || last.messages + messages > messages_) {
      last = {};
      ++launches;
    }
    ++last.regions;
    last.messages += messages;
  }
  int launches = 0;

 private:
  struct Last {
    int regions = 0, messages = 0;
  };
  const int regions_, messages_;
  std::map<const Codec*, Last> last_;
};

int launches_of(const Program& program) {
  int launches = 0;
  for (const auto& tick : program.ticks) {
    for (int half : {0, 1}) {
      Packing sums(122, 1200), decodes(480, 1);
      for (const SegmentWork& part : tick) {
        if (part.segment % 2 != half) continue;
        for (const SumStep& step : part.sums) sums.add(step.region.codec, static_cast<int>(step.received.size()));
        for (const DecodeStep& step : part.decodes) decodes.add(step.region.codec, 0);
      }
      launches += sums.launches + decodes.launches;
    }
  }
  return launches;
}

// As in the hook, parameters of one dimension and small ones are raw.
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
          {"a stage of ResNet-50", bucket(resnet)},
          {"small parameters", bucket(std::vector<int64_t>(400, 16 * 1024))}};
}

Program program_of(const Layout& layout, const std::string& algorithm, int rank, int ranks, int segments) {
  return lower(make_plan(Collective::all_reduce, algorithm, rank, ranks), cut_by_region(layout, segments), Result::values);
}

// The hook uses `direct` on a device. Before regions were launched together, it needed 237 launches for a layer of GPT-2, and the ring
// needed 497 for a stage of ResNet-50.
TEST(Launches, AreFewForAllModels) {
  const Codec& int8 = find_codec("int8");
  struct Most {
    int by_direct, by_ring;
  };
  const std::map<std::string, Most> at_most = {
      {"one parameter", {9, 34}}, {"a layer of GPT-2", {14, 44}}, {"a stage of ResNet-50", {18, 65}}, {"small parameters", {36, 58}}};
  for (const auto& [name, layout] : buckets()) {
    const int64_t bytes = message_bytes(layout);
    const int segments = select(Collective::all_reduce, "direct", 0, world_size, bytes, int8, bytes).segments;
    const int direct = launches_of(program_of(layout, "direct", 3, world_size, segments));
    const int ring = launches_of(program_of(layout, "ring", 3, world_size, segments));
    EXPECT_LE(direct, at_most.at(name).by_direct) << name;
    EXPECT_LE(ring, at_most.at(name).by_ring) << name;
  }
}

#ifdef DLTRAIN_EMULATED

class LaunchesOn : public nccl::OverNccl {};
INSTANTIATE_TEST_SUITE_P(Contexts, LaunchesOn, testing::Values("cuda"), [](const auto& info) { return info.param; });

TEST_P(LaunchesOn, AreThoseOfTheProgram) {
  constexpr int ranks = 2;
  std::vector<int64_t> parameters(140, 300);  // more than one launch takes
  parameters.insert(parameters.end(), {20'000, 12'345, 7, 10'000});
  const Layout layout = bucket(parameters);
  const int64_t numel = layout.back().span.first + layout.back().span.count;
  int expected = 0;
  for (int rank = 0; rank < ranks; ++rank) expected += launches_of(program_of(layout, "direct", rank, ranks, 1)) + 1;  // and the NaN kernel
  const int before = emulated_cuda::launches;
  nccl::on_nccl_ranks(context(), ranks, [&](Executor& executor, Runner& runner, const ExecutionContext& context) {
    CallOptions call;
    call.algorithm = "direct";
    call.codec = "int8";
    call.segments = 1;
    call.layout = &layout;
    const Array<float> array(context, std::vector<float>(numel, 127.0f));
    runner.run(executor, {array.data()}, numel, call);
    EXPECT_EQ(array.values(), std::vector<float>(numel, 254.0f));
  });
  EXPECT_EQ(emulated_cuda::launches - before, expected);
}

#endif

}  // namespace
}  // namespace dltrain::comm
