#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "comm/plan/plan.h"
#include "comm/plan/verify.h"

namespace dltrain::comm {
namespace {

std::vector<Plan> all_ranks(const std::string& algorithm, int world_size) {
  std::vector<Plan> plans;
  for (int rank = 0; rank < world_size; ++rank) plans.push_back(make_plan(algorithm, rank, world_size));
  return plans;
}

TEST(Plans, EveryAlgorithmIsAnAllReduceForEveryWorldSize) {
  for (const std::string& algorithm : algorithms()) {
    for (int world_size = 1; world_size <= 32; ++world_size) EXPECT_NO_THROW(verify(all_ranks(algorithm, world_size))) << algorithm;
  }
}

// The rule that the verifier names for ring plans of four ranks after `damage`.
std::string broken_rule(const std::function<void(std::vector<Plan>&)>& damage) {
  std::vector<Plan> plans = all_ranks("ring", 4);
  damage(plans);
  try {
    verify(plans);
  } catch (const BrokenPlan& error) {
    return std::string(error.what()).substr(0, 2);
  }
  return "none";
}

TEST(Verify, NamesTheRule) {
  EXPECT_EQ(broken_rule([](auto&) {}), "none");
  EXPECT_EQ(broken_rule([](auto& plans) { plans[2].rounds[1].pop_back(); }), "R1");                      // dropped receive
  EXPECT_EQ(broken_rule([](auto& plans) { plans[1].rounds[0][0].peer = 3; }), "R1");                     // swapped peer
  EXPECT_EQ(broken_rule([](auto& plans) { plans[1].rounds[0][0].peer = 9; }), "R1");                     // nobody
  EXPECT_EQ(broken_rule([](auto& plans) { plans[0].rounds[3][0].chunks = {2, 3}; }), "R2");              // finalizes what is incomplete
  EXPECT_EQ(broken_rule([](auto& plans) { std::swap(plans[0].rounds[3], plans[0].rounds[4]); }), "R4");  // hands on too early
}

TEST(Verify, RejectsValuesMadeTwice) {
  // Each of two ranks finalizes the whole sum itself: complete, but not the bytes of one finalize.
  const auto plan = [](int rank) {
    return Plan{
        "own", rank, 2, 1, {{{Op::recv_reduce, 1 - rank, {0, 1}}, {Op::send_partial, 1 - rank, {0, 1}}}, {{Op::finalize, -1, {0, 1}}}}};
  };
  try {
    verify({plan(0), plan(1)});
    FAIL() << "not rejected";
  } catch (const BrokenPlan& error) {
    EXPECT_EQ(std::string(error.what()).substr(0, 2), "R4");  // encoded twice
  }
}

TEST(Plans, AreDrawnAndWritten) {
  const Plan plan = make_plan("ring", 1, 4);
  EXPECT_NE(draw(plan).find("rank 1 of 4: 6 rounds over 4 chunks"), std::string::npos);
  EXPECT_NE(to_json(plan).find(R"({"op": "send_partial", "peer": 2, "chunks": [1, 2]})"), std::string::npos);
}

}  // namespace
}  // namespace dltrain::comm
