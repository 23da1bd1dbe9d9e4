#include "comm/run/two_levels.h"

#include <algorithm>
#include <latch>
#include <map>
#include <numeric>
#include <thread>

#include "tests/comm/ranks.h"
#include "tests/contexts.h"

namespace dltrain::comm {
namespace {

// Runs body(levels, inside, across, rank, context) on the given number of ranks of each host, each in a thread.
template <class Body>
void on_hosts(const ExecutionContext& kind, const std::vector<int>& hosts, Body body, int64_t saving = TwoLevels::enough) {
  const auto wrapped = [&](std::unique_ptr<Transport> end) -> std::unique_ptr<Transport> {
    if (kind.on_cuda()) return end;
    return std::make_unique<FramedTransport>(std::move(end));
  };
  const int shards = std::ranges::min(hosts), world_size = std::accumulate(hosts.begin(), hosts.end(), 0);
  std::vector<std::vector<std::unique_ptr<Transport>>> across(shards);
  for (auto& ends : across) ends = in_process_group(static_cast<int>(hosts.size()));
  std::vector<std::thread> threads;
  for (size_t host = 0; host < hosts.size(); ++host) {
    auto inside = in_process_group(hosts[host]);
    for (int local = 0; local < hosts[host]; ++local) {
      auto to_host = std::move(inside[local]), to_others = std::move(local < shards ? across[local][host] : in_process_group(1)[0]);
      const auto rank = static_cast<int>(threads.size());
      threads.emplace_back([&, rank, to_host = std::move(to_host), to_others = std::move(to_others)]() mutable {
        const OwnContext own(kind);
        Executor in(wrapped(std::move(to_host))), out(wrapped(std::move(to_others)));
        TwoLevels levels(in, out, {static_cast<int>(hosts.size()), shards, world_size}, saving);
        body(levels, in, out, rank, own.context());
        Event::record(own.context()).synchronize();
      });
    }
  }
  for (auto& thread : threads) thread.join();
}

class TwoLevelsOn : public OnEveryContext {};
DLT_ON_EVERY_CONTEXT(TwoLevelsOn);

TEST_P(TwoLevelsOn, AddUp) {
  const bool all = !is_slow(context());
  for (const std::vector<int>& hosts : {std::vector{2, 2}, {2, 2, 2}, {3, 3}, {3, 2}, {1, 3, 2}}) {
    const int world_size = std::accumulate(hosts.begin(), hosts.end(), 0);
    for (const int64_t numel : all ? std::vector<int64_t>{0, 1, 31, 33, 1000, 2'100'001} : std::vector<int64_t>{33}) {
      std::vector<std::vector<float>> results(world_size);
      on_hosts(context(), hosts, [&](TwoLevels& levels, Executor&, Executor&, int rank, const ExecutionContext& context) {
        std::vector<float> values(numel);
        for (int64_t i = 0; i < numel; ++i) values[i] = static_cast<float>((i * 7 + rank * 13) % 31 - 15);
        const Array<float> array(context, values);
        CallOptions call;
        call.algorithm = "ring";
        levels.all_reduce(context, array.data(), numel, call);
        results[rank] = array.values();
      });
      for (int64_t i = 0; i < numel; ++i) {
        float sum = 0;
        for (int rank = 0; rank < world_size; ++rank) sum += static_cast<float>((i * 7 + rank * 13) % 31 - 15);
        for (const auto& result : results) ASSERT_EQ(result[i], sum) << testing::PrintToString(hosts) << " n=" << numel << " i=" << i;
      }
    }
  }
}

// Averages weigh all ranks equally, whatever their hosts. The link of a host carries what one rank would send, for any number of ranks.
TEST_P(TwoLevelsOn, WeighRanksAlike) {
  constexpr int64_t numel = 96;
  for (const std::vector<int>& hosts : {std::vector{4, 4}, {5, 3}, {8, 1}}) {
    const int world_size = std::accumulate(hosts.begin(), hosts.end(), 0);
    std::vector<int64_t> sent(world_size);
    std::vector<std::vector<float>> results(world_size);
    on_hosts(context(), hosts, [&](TwoLevels& levels, Executor&, Executor& across, int rank, const ExecutionContext& context) {
      const Array<float> array(context, std::vector<float>(numel, static_cast<float>(rank)));
      CallOptions call;
      call.algorithm = "direct";
      call.average = true;
      levels.all_reduce(context, array.data(), numel, call);
      results[rank] = array.values();
      sent[rank] = across.wire_bytes();
    });
    for (const auto& result : results) {
      EXPECT_EQ(result, results[0]);
      EXPECT_FLOAT_EQ(result[0], static_cast<float>(world_size - 1) / 2) << testing::PrintToString(hosts);
    }
    const auto other = sent.begin() + hosts[0];
    EXPECT_EQ(std::accumulate(sent.begin(), other, int64_t{0}), numel * 4) << testing::PrintToString(hosts);
    EXPECT_EQ(std::accumulate(other, sent.end(), int64_t{0}), numel * 4) << testing::PrintToString(hosts);
  }
}

// Messages between hosts use the codec of each region, although a rank's shard may begin anywhere in a region.
TEST_P(TwoLevelsOn, KeepRegionsApart) {
  constexpr int64_t numel = 3000;
  const Layout layout = {
      {{5, 1030}, &find_codec("int8"), 0}, {{1040, 61}, &find_codec("raw"), 1032}, {{1101, 1500}, &find_codec("int4"), 1096}};
  const auto given = [](int64_t i, int rank) { return static_cast<float>((i * 7 + rank * 13) % 31 - 15); };
  std::vector<std::vector<float>> results(4);
  on_hosts(context(), {2, 2}, [&](TwoLevels& levels, Executor&, Executor&, int rank, const ExecutionContext& context) {
    std::vector<float> values(numel);
    for (int64_t i = 0; i < numel; ++i) values[i] = given(i, rank);
    const Array<float> array(context, values);
    CallOptions call;
    call.algorithm = "ring";
    call.codec = "int8";
    call.layout = &layout;
    levels.all_reduce(context, array.data(), numel, call);
    results[rank] = array.values();
  });
  for (const auto& [span, codec, number, owner] : layout) {
    for (int64_t i = span.first; i < span.first + span.count; ++i) {
      float sum = 0;
      for (int rank = 0; rank < 4; ++rank) sum += given(i, rank);
      for (const auto& result : results) ASSERT_EQ(result[i], results[0][i]);
      ASSERT_NEAR(results[0][i], sum, codec->nearest_error.max * 3 * 60) << i;
    }
  }
}

// Sending messages instead of values within a host gives the same bits, and fewer bytes.
TEST_P(TwoLevelsOn, ShareMessagesWithinHosts) {
  constexpr int64_t numel = 4000, always = 1, never = int64_t{1} << 40;
  const Layout layout = {
      {{0, 1030}, &find_codec("int8"), 0}, {{1030, 70}, &find_codec("raw"), 1032}, {{1100, 2900}, &find_codec("int4"), 1104}};
  struct Case {
    const char *algorithm, *codec;
    const Layout* layout;
    std::vector<int> hosts;
    bool encoded = true;
  };
  for (const Case& given :
       {Case{"direct", "int8", nullptr, {2, 2}}, Case{"ring", "fp16", nullptr, {3, 2}}, Case{"tree", "int4", &layout, {2, 2}},
        Case{"oneshot", "int8", nullptr, {2, 2}, false}, Case{"direct", "raw", nullptr, {2, 2}, false}}) {
    const int world_size = std::accumulate(given.hosts.begin(), given.hosts.end(), 0);
    std::map<int64_t, std::vector<std::vector<float>>> results;
    std::map<int64_t, std::vector<int64_t>> sent;
    for (const int64_t saving : {always, never}) {
      auto& result = results[saving];
      auto& bytes = sent[saving];
      result.resize(world_size);
      bytes.resize(world_size);
      const auto body = [&](TwoLevels& levels, Executor& inside, Executor&, int rank, const ExecutionContext& context) {
        std::vector<float> values(numel);
        for (int64_t i = 0; i < numel; ++i) values[i] = static_cast<float>((i * 7 + rank * 13) % 31) / 7;
        const Array<float> array(context, values);
        CallOptions call;
        call.algorithm = given.algorithm;
        call.codec = given.codec;
        call.layout = given.layout;
        call.average = true;
        for (int step = 0; step < 2; ++step) levels.all_reduce(context, array.data(), numel, call);
        result[rank] = array.values();
        bytes[rank] = inside.wire_bytes();
      };
      on_hosts(context(), given.hosts, body, saving);
    }
    EXPECT_EQ(results[always], results[never]) << given.algorithm << " " << given.codec;
    for (const auto& result : results[always]) EXPECT_EQ(result, results[always][0]) << given.algorithm << " " << given.codec;
    for (int rank = 0; rank < world_size; ++rank) {
      const bool has_share = rank % given.hosts[0] < given.hosts.back();
      EXPECT_EQ(sent[always][rank] < sent[never][rank], given.encoded && has_share) << given.algorithm << " " << rank;
    }
  }
}

// A dead rank is an error on all others, also on those that wait for none of its messages.
TEST(TwoLevels, FailOnEveryRank) {
  std::latch over(3);
  on_hosts({}, {2, 2}, [&](TwoLevels& levels, Executor& inside, Executor& across, int rank, const ExecutionContext& context) {
    if (rank == 3) return over.wait();
    std::vector<float> values(2'100'001, 1.0f);
    CallOptions call;
    call.timeout = std::chrono::milliseconds(500);
    EXPECT_THROW(levels.all_reduce(context, values.data(), std::ssize(values), call), CollectiveError) << rank;
    for (Executor* level : {&inside, &across}) {
      EXPECT_NE(level->failure(), "") << rank;
      level->close();
    }
    over.count_down();
  });
}

}  // namespace
}  // namespace dltrain::comm
