// Several syncer shards: each with its fragments, epochs, clock and lives; one that dies is missed by its fragments alone.
#include <algorithm>

#include "diloco/sim/simulate.h"
#include "sim/clusters.h"

namespace diloco::sim {
namespace {

ClusterOptions shards_of(std::uint32_t shards, const std::vector<Seconds>& step_times, std::uint32_t sync_every = 12) {
  ClusterOptions options = cluster_of(step_times, sync_every);
  options.shards = shards;
  options.check_values = true;
  return options;
}

std::size_t merges_of_shard(const Cluster& cluster, std::uint32_t shard, TimePoint since, TimePoint until) {
  return static_cast<std::size_t>(std::count_if(cluster.merges().begin(), cluster.merges().end(), [&](const MergeRecord& merge) {
    return merge.shard == shard && merge.at >= since && merge.at < until;
  }));
}

void expect_owners_merge(Cluster& cluster, const Plan& plan) {
  for (const auto& merge : cluster.merges()) EXPECT_EQ(merge.shard, plan.fragments.at(merge.fragment).shard);
}

std::vector<FragmentId> fragments_of(const Plan& plan, std::uint32_t shard) {
  std::vector<FragmentId> out;
  for (FragmentId p = 0; p < plan.size(); ++p) {
    if (plan.fragments[p].shard == shard) out.push_back(p);
  }
  return out;
}

TEST(Shards, ShareTheFragmentsAndMergeEverybody) {
  for (const std::uint32_t shards : {2u, 3u, 6u}) {
    Cluster cluster(shards_of(shards, {1.0, 1.3, 2.0}));
    cluster.run_until(200.0);
    expect_sound(cluster);
    expect_owners_merge(cluster, cluster.syncer()->plan());
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(cluster.learner(i)->stats().state, "training");
      for (FragmentId p = 0; p < 6; ++p) EXPECT_GT(merges_with(cluster, "learner-" + std::to_string(i), p), 8u) << p;
    }
    const Tensors global = cluster.global_parameters();
    ASSERT_EQ(global.size(), small_layout().tensors.size());
    for (const auto& tensor : global) {
      for (const float value : tensor) EXPECT_NEAR(value, 1.0f, 0.2f);  // where the learners' data pulls
    }
  }
}

TEST(Shards, WhileOneIsDeadTheOthersFragmentsAreMerged) {
  Cluster cluster(shards_of(3, {1.0, 1.0, 1.5}));
  cluster.run_until(100.0);
  const Plan plan = cluster.syncer(1)->plan();
  const std::uint64_t epoch = cluster.syncer(1)->epoch(), others = cluster.syncer(0)->epoch();
  std::vector<Version> newest;
  for (const FragmentId p : fragments_of(plan, 1)) newest.push_back(cluster.syncer(1)->fragment(p)->version);
  ASSERT_FALSE(newest.empty());
  cluster.kill_syncer(1);
  EXPECT_TRUE(cluster.global_parameters().empty());  // not all of them
  cluster.run_until(160.0);
  EXPECT_EQ(cluster.syncer(1), nullptr);
  EXPECT_EQ(merges_of_shard(cluster, 1, 100.0, 160.0), 0u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(cluster.learner(i)->stats().shards_away, std::vector<std::uint32_t>{1});
    EXPECT_GE(static_cast<double>(cluster.steps(i)), 155.0 / (i == 2 ? 1.5 : 1.0));
  }
  for (const std::uint32_t s : {0u, 2u}) {
    // At the pace of before.
    EXPECT_GE(merges_of_shard(cluster, s, 100.0, 160.0) + 2, merges_of_shard(cluster, s, 40.0, 100.0)) << s;
    for (const FragmentId p : fragments_of(plan, s)) EXPECT_GE(merges_with(cluster, "learner-2", p, 100.0), 3u) << p;
  }

  cluster.start_syncer(1);
  cluster.run_until(300.0);
  expect_sound(cluster);
  expect_owners_merge(cluster, plan);
  EXPECT_GT(cluster.syncer(1)->epoch(), epoch);
  EXPECT_EQ(cluster.syncer(0)->epoch(), others);
  EXPECT_EQ(cluster.syncer(2)->epoch(), others);
  std::size_t at = 0;
  for (const FragmentId p : fragments_of(plan, 1)) {
    EXPECT_GT(cluster.syncer(1)->fragment(p)->version.epoch, newest[at].epoch);
    EXPECT_GT(cluster.syncer(1)->fragment(p)->version.n, newest[at++].n);  // it went on from where the learners were
    for (const auto* id : {"learner-0", "learner-1", "learner-2"}) EXPECT_GT(merges_with(cluster, id, p, 170.0), 4u) << id;
  }
  EXPECT_FALSE(cluster.global_parameters().empty());
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(cluster.learner(i)->stats().state, "training");
    EXPECT_EQ(cluster.learner(i)->stats().reconnects, 1u);
  }
}

TEST(Shards, AFrozenOneAndOneWithAClockThatJumpsAreMissedByNobodyElse) {
  Cluster cluster(shards_of(3, {1.0, 1.2}));
  cluster.run_until(60.0);
  cluster.freeze_syncer(true, 2);
  cluster.jump_syncer_clock(25.0, 1);
  cluster.run_until(90.0);
  EXPECT_EQ(merges_of_shard(cluster, 2, 60.1, 90.0), 0u);
  for (const std::uint32_t s : {0u, 1u}) EXPECT_GE(merges_of_shard(cluster, s, 60.0, 90.0), 3u) << s;
  cluster.freeze_syncer(false, 2);
  cluster.run_until(200.0);
  expect_sound(cluster);
  for (std::uint32_t s = 0; s < 3; ++s) EXPECT_GE(merges_of_shard(cluster, s, 110.0, 200.0), 10u) << s;
}

TEST(Shards, OneStopsAloneAndItsConnectionsCanBreakAlone) {
  Cluster cluster(shards_of(2, {1.0, 1.0}));
  cluster.run_until(60.0);
  for (TimePoint t = 60.0; t < 90.0; t += 2.0) {
    cluster.run_until(t);
    cluster.cut_connections(0, 1);
  }
  EXPECT_GE(merges_of_shard(cluster, 0, 60.0, 88.0) + 1, merges_of_shard(cluster, 0, 32.0, 60.0));
  EXPECT_EQ(cluster.learner(0)->stats().discarded.size(), 0u);
  cluster.run_until(120.0);
  cluster.stop_syncer(20.0, 1);
  cluster.run_until(160.0);
  EXPECT_TRUE(cluster.syncer_stopped(1));
  EXPECT_FALSE(cluster.syncer_stopped(0));
  EXPECT_GE(merges_of_shard(cluster, 0, 120.0, 160.0) + 1, merges_of_shard(cluster, 0, 20.0, 60.0));
  EXPECT_EQ(merges_of_shard(cluster, 1, 150.0, 160.0), 0u);
  expect_sound(cluster);
}

// All that happens in random scenarios, with several shards in every one of them.
class RandomShardScenarios : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(RandomShardScenarios, AreSound) {
  for (std::uint64_t seed = 1 + 1000 * GetParam(), run = 0; run < 25; ++seed) {
    Scenario scenario = random_scenario(seed, seed % 2 == 0);
    if (scenario.shards == 1) continue;
    ++run;
    const Outcome outcome = run_scenario(scenario);
    for (const auto& violation : outcome.violations) {
      ADD_FAILURE() << violation.invariant << " with seed " << seed << " at event " << violation.event << ": " << violation.text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomShardScenarios, ::testing::Range<std::uint64_t>(0, 4));

TEST(Shards, AScenarioNamesThemAndShrinksToOneWhereOneIsEnough) {
  std::uint64_t seed = 1;
  while (random_scenario(seed, true).shards < 3) ++seed;
  Scenario scenario = random_scenario(seed, true);
  scenario.faults = {{FaultKind::kKillSyncer, 10.0, 0, 5.0, 0.0, 2}};
  EXPECT_EQ(to_json(scenario_from_json(to_json(scenario))), to_json(scenario));
  scenario.plant = Plant::kForgedMerge;
  const Scenario small = shrink(scenario);
  EXPECT_EQ(small.shards, 1u);
  ASSERT_FALSE(run_scenario(small).violations.empty());
  EXPECT_EQ(run_scenario(small).violations.front().invariant, "merged_once");
}

}  // namespace
}  // namespace diloco::sim
