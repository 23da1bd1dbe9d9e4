#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "comm/plan/plan.h"
#include "comm/plan/verify.h"

namespace dltrain::comm {
namespace {

std::vector<Plan> all_ranks(Collective collective, const std::string& algorithm, int world_size, int root = 0) {
  std::vector<Plan> plans;
  for (int rank = 0; rank < world_size; ++rank) plans.push_back(make_plan(collective, algorithm, rank, world_size, root));
  return plans;
}

TEST(Plans, FormTheirCollectiveForEveryWorldSize) {
  for (const Collective collective : collectives) {
    for (const std::string& algorithm : algorithms(collective)) {
      for (int world_size = 1; world_size <= 32; ++world_size) {
        for (int root = 0; root < (is_rooted(collective) ? world_size : 1); ++root) {
          EXPECT_NO_THROW(verify(all_ranks(collective, algorithm, world_size, root))) << name(collective) << " by " << algorithm;
        }
      }
    }
  }
}

TEST(Plans, HaveIndices) {
  for (const Collective collective : collectives) {
    for (const std::string& algorithm : algorithms(collective)) {
      const int index = index_of(collective, algorithm);
      EXPECT_TRUE(is_plan(index) && collective_of(index) == collective && algorithm_of(index) == algorithm);
    }
    EXPECT_EQ(find_collective(name(collective)), collective);
  }
  EXPECT_FALSE(is_plan(-1));
  EXPECT_THROW(index_of(Collective::broadcast, "ring"), std::invalid_argument);
  EXPECT_THROW(make_plan(Collective::all_gather, "ring", 0, 2, 1), std::invalid_argument);
  EXPECT_THROW(find_collective("allreduce"), std::invalid_argument);
}

// Returns the rule that the verifier names for plans of four ranks after `damage`.
std::string broken_rule(const std::function<void(std::vector<Plan>&)>& damage, Collective collective = Collective::all_reduce,
                        const std::string& algorithm = "ring") {
  std::vector<Plan> plans = all_ranks(collective, algorithm, 4);
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
  EXPECT_EQ(broken_rule([](auto& plans) { plans[1].rounds[0][0].peer = 9; }), "R1");                     // no such rank
  EXPECT_EQ(broken_rule([](auto& plans) { plans[0].rounds[3][0].chunks = {2, 3}; }), "R2");              // finalizes an incomplete sum
  EXPECT_EQ(broken_rule([](auto& plans) { std::swap(plans[0].rounds[3], plans[0].rounds[4]); }), "R4");  // sends a chunk too early
}

TEST(Verify, NamesTheRuleForEachCollective) {
  using enum Collective;
  // The root does not receive from one of its children; a leaf sends what it does not have; the last chunks are never sent.
  EXPECT_EQ(broken_rule([](auto& plans) { plans[0].rounds[1].pop_back(); }, reduce, "tree"), "R1");
  EXPECT_EQ(broken_rule([](auto& plans) { plans[3].rounds[0].insert(plans[3].rounds[0].begin(), {Op::finalize, -1, {0, 1}}); }, broadcast,
                        "tree"),
            "R2");
  EXPECT_EQ(broken_rule([](auto& plans) { plans[3].rounds[0].push_back({Op::send_partial, 1, {0, 1}}); }, broadcast, "tree"), "R4");
  EXPECT_EQ(broken_rule(
                [](auto& plans) {
                  for (Plan& plan : plans) plan.rounds.pop_back();
                },
                all_gather, "ring"),
            "R2");
  // A chunk that its owner never receives is missing, and so is one that some rank never sends.
  EXPECT_EQ(broken_rule(
                [](auto& plans) {
                  for (Plan& plan : plans) plan.rounds.clear();
                },
                reduce_scatter, "direct"),
            "R2");
  EXPECT_THROW(verify({make_plan(reduce, "tree", 0, 2), make_plan(broadcast, "tree", 1, 2)}), std::invalid_argument);
  EXPECT_THROW(verify({make_plan(reduce, "tree", 0, 2), make_plan(reduce, "tree", 1, 2, 1)}), std::invalid_argument);
}

TEST(Verify, RejectsValuesThatAreFinalizedTwice) {
  // Each of two ranks finalizes the whole sum itself: it is complete, but not the bytes of one encoding.
  const auto plan = [](int rank) {
    return Plan{Collective::all_reduce,
                "own",
                rank,
                2,
                1,
                0,
                {{{Op::recv_reduce, 1 - rank, {0, 1}}, {Op::send_partial, 1 - rank, {0, 1}}}, {{Op::finalize, -1, {0, 1}}}}};
  };
  try {
    verify({plan(0), plan(1)});
    FAIL() << "not rejected";
  } catch (const BrokenPlan& error) {
    EXPECT_EQ(std::string(error.what()).substr(0, 2), "R4");  // encoded twice
  }
}

TEST(Plans, AreDrawnAndListed) {
  const Plan plan = make_plan(Collective::all_reduce, "ring", 1, 4);
  EXPECT_NE(draw(plan).find("rank 1 of 4: 6 rounds over 4 chunks"), std::string::npos);
  EXPECT_NE(to_json(plan).find(R"({"op": "send_partial", "peer": 2, "chunks": [1, 2]})"), std::string::npos);
}

}  // namespace
}  // namespace dltrain::comm
