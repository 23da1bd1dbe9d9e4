#include "comm/two_levels.h"

#include <latch>
#include <thread>

#include "tests/places.h"
#include "tests/ranks.h"

namespace dltrain::comm {
namespace {

// Runs body(levels, inside, across, rank, the rank's place) on hosts * per_host ranks, each a thread.
template <class Body>
void on_hosts(const Place& kind, int hosts, int per_host, Body body) {
  const auto wrapped = [&](std::unique_ptr<Transport> end) -> std::unique_ptr<Transport> {
    if (kind.on_cuda()) return end;
    return std::make_unique<Envelopes>(std::move(end));
  };
  std::vector<std::vector<std::unique_ptr<Transport>>> inside(hosts), across(per_host);
  for (auto& ends : inside) ends = in_process_group(per_host);
  for (auto& ends : across) ends = in_process_group(hosts);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < hosts * per_host; ++rank) {
    threads.emplace_back([&, rank] {
      const int host = rank / per_host, local = rank % per_host;
      const OwnPlace own(kind);
      Executor in(wrapped(std::move(inside[host][local]))), out(wrapped(std::move(across[local][host])));
      TwoLevels levels(in, out);
      body(levels, in, out, rank, own.place());
      Event::record(own.place()).synchronize();
    });
  }
  for (auto& thread : threads) thread.join();
}

class TwoLevelsOn : public OnEveryPlace {};
DLT_ON_EVERY_PLACE(TwoLevelsOn);

TEST_P(TwoLevelsOn, AddUp) {
  const bool all = !is_slow(place());
  for (const auto& [hosts, per_host] : {std::pair{2, 2}, std::pair{3, 2}, std::pair{2, 3}}) {
    const int world_size = hosts * per_host;
    for (const int64_t numel : all ? std::vector<int64_t>{0, 1, 31, 33, 1000, 2'100'001} : std::vector<int64_t>{33}) {
      std::vector<std::vector<float>> results(world_size);
      on_hosts(place(), hosts, per_host, [&](TwoLevels& levels, Executor&, Executor&, int rank, const Place& place) {
        std::vector<float> values(numel);
        for (int64_t i = 0; i < numel; ++i) values[i] = static_cast<float>((i * 7 + rank * 13) % 31 - 15);
        const Array<float> array(place, values);
        AllReduce call;
        call.algorithm = "ring";
        levels.all_reduce(place, array.data(), numel, call);
        results[rank] = array.values();
      });
      for (int64_t i = 0; i < numel; ++i) {
        float sum = 0;
        for (int rank = 0; rank < world_size; ++rank) sum += static_cast<float>((i * 7 + rank * 13) % 31 - 15);
        for (const auto& result : results) ASSERT_EQ(result[i], sum) << hosts << " x " << per_host << " n=" << numel << " i=" << i;
      }
    }
  }
}

// What crosses hosts does so in each region's codec, though a rank's share may begin anywhere in one.
TEST_P(TwoLevelsOn, KeepRegionsApart) {
  constexpr int64_t numel = 3000;
  const Layout layout = {
      {{5, 1030}, &find_codec("int8"), 0}, {{1040, 61}, &find_codec("raw"), 1032}, {{1101, 1500}, &find_codec("int4"), 1096}};
  const auto given = [](int64_t i, int rank) { return static_cast<float>((i * 7 + rank * 13) % 31 - 15); };
  std::vector<std::vector<float>> results(4);
  on_hosts(place(), 2, 2, [&](TwoLevels& levels, Executor&, Executor&, int rank, const Place& place) {
    std::vector<float> values(numel);
    for (int64_t i = 0; i < numel; ++i) values[i] = given(i, rank);
    const Array<float> array(place, values);
    AllReduce call;
    call.algorithm = "ring";
    call.codec = "int8";
    call.layout = &layout;
    levels.all_reduce(place, array.data(), numel, call);
    results[rank] = array.values();
  });
  for (const auto& [span, codec, number] : layout) {
    for (int64_t i = span.first; i < span.first + span.count; ++i) {
      float sum = 0;
      for (int rank = 0; rank < 4; ++rank) sum += given(i, rank);
      for (const auto& result : results) ASSERT_EQ(result[i], results[0][i]);
      ASSERT_NEAR(results[0][i], sum, codec->nearest_error.max * 3 * 60) << i;
    }
  }
}

// A rank that is gone is an error on all others, also on those that wait for none of its messages.
TEST(TwoLevels, FailOnEveryRank) {
  std::latch over(3);
  on_hosts({}, 2, 2, [&](TwoLevels& levels, Executor& inside, Executor& across, int rank, const Place& place) {
    if (rank == 3) return over.wait();
    std::vector<float> values(2'100'001, 1.0f);
    AllReduce call;
    call.timeout = std::chrono::milliseconds(500);
    EXPECT_THROW(levels.all_reduce(place, values.data(), std::ssize(values), call), AllReduceError) << rank;
    for (Executor* level : {&inside, &across}) {
      EXPECT_NE(level->failure(), "") << rank;
      level->close();
    }
    over.count_down();
  });
}

}  // namespace
}  // namespace dltrain::comm
