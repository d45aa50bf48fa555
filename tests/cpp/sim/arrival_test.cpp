// trigger = arrival (Async Local-SGD): everybody by its own step count, merged alone, answered alone.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <map>

#include "sim/clusters.h"

namespace diloco::sim {
namespace {

ClusterOptions async_cluster(const std::vector<Seconds>& steps) {
  auto options = cluster_of(steps, 10, 1);
  options.settings.trigger = Trigger::kArrival;
  options.settings.grace = Grace::kNone;
  options.settings.overlap_steps = 0;
  options.settings.adopt = Adopt::kOverwrite;
  return options;
}

TEST(Arrival, EveryRoundHasOneMemberAndIsAnsweredToItAlone) {
  Cluster cluster(async_cluster({1.0, 1.3, 4.0}));
  cluster.run_until(400.0);
  expect_sound(cluster);
  ASSERT_GT(cluster.merges().size(), 60u);
  std::map<std::string, std::size_t> rounds;
  for (const auto& merge : cluster.merges()) {
    ASSERT_EQ(merge.members.size(), 1u);
    EXPECT_EQ(merge.reason, "arrival");
    ++rounds[merge.members[0].learner];
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const auto id = "learner-" + std::to_string(i);
    EXPECT_GT(rounds[id], 7u) << id;
    // Nothing is adopted but the first weights and the answers to its own work.
    EXPECT_LE(cluster.learner(i)->stats().adoptions, rounds[id] + 1) << id;
  }
  // By their own clocks: as many rounds as steps / sync_every, whatever the others do.
  EXPECT_NEAR(static_cast<double>(rounds["learner-0"]) / static_cast<double>(rounds["learner-2"]), 4.0, 0.6);
}

// DyLU (Eq. 6): floor(v / max v * H) steps, so that all come equally often.
TEST(Arrival, DyluGivesSlowLearnersFewerSteps) {
  auto options = async_cluster({1.0, 2.0, 3.0});
  options.settings.sync_every = 12;
  options.settings.step_counts = StepCounts::kDylu;
  Cluster cluster(options);
  cluster.run_until(600.0);
  expect_sound(cluster);
  std::map<std::string, std::uint64_t> last_steps;
  std::map<std::string, std::size_t> rounds;
  for (const auto& line : cluster.records()) {
    const auto json = nlohmann::json::parse(line);
    if (json["event"] != "merge" || json["t"] < 60.0) continue;
    last_steps[json["members"][0]["learner"]] = json["members"][0]["steps"];
    ++rounds[json["members"][0]["learner"]];
  }
  // One more where the learner is in the middle of a step when it is asked.
  EXPECT_NEAR(last_steps["learner-0"], 12, 1);
  EXPECT_NEAR(last_steps["learner-1"], 6, 1);
  EXPECT_NEAR(last_steps["learner-2"], 4, 1);
  EXPECT_NEAR(static_cast<double>(rounds["learner-2"]) / static_cast<double>(rounds["learner-0"]), 1.0, 0.25);
}

TEST(Arrival, ManyFragmentsKillsAndReturns) {
  for (const Adopt adopt : {Adopt::kRebase, Adopt::kOverwrite, Adopt::kBlend}) {
    auto options = async_cluster({1.0, 1.5, 0.7});
    options.settings.num_fragments = 6;
    options.settings.adopt = adopt;
    options.bytes_per_s = 3000.0;
    Cluster cluster(options);
    cluster.run_until(100.0);
    cluster.kill_learner(0);
    cluster.run_until(130.0);
    cluster.start_learner(0);
    cluster.kill_syncer();
    cluster.run_until(150.0);
    cluster.start_syncer();
    cluster.run_until(500.0);
    expect_sound(cluster);
    for (std::size_t i = 0; i < 3; ++i) {
      for (FragmentId p = 0; p < 6; ++p) {
        EXPECT_GT(merges_with(cluster, "learner-" + std::to_string(i), p, 200.0), 5u) << i << " fragment " << p;
      }
    }
  }
}

// What makes the weights infinite is refused and the next contribution is merged.
TEST(Arrival, APoisonedLearnerDoesNotBlockTheFragment) {
  Cluster cluster(async_cluster({1.0, 1.0}));
  cluster.run_until(50.0);
  cluster.poison(0);
  cluster.run_until(200.0);
  expect_sound(cluster);
  EXPECT_GT(merges_with(cluster, "learner-1", 0, 60.0), 5u);
  EXPECT_GT(merges_with(cluster, "learner-0", 0, 100.0), 3u);
}

}  // namespace
}  // namespace diloco::sim
