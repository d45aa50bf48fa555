// Kills, freezes, partitions, poison: the rest goes on, the accounts add up.
#include <cmath>

#include "sim/clusters.h"

namespace diloco::sim {
namespace {

TEST(Faults, AKilledLearnerIsNotMissedAndComesBack) {
  Cluster cluster(cluster_of({1.0, 1.0, 1.5}));
  cluster.run_until(100.0);
  const auto before = cluster.merges().size();
  cluster.kill_learner(2);
  cluster.run_until(200.0);
  EXPECT_GE(cluster.merges().size() - before, 40u);  // rounds went on at the same rate: 6 per 12 s
  EXPECT_GT(cluster.steps(0), 195u);
  cluster.start_learner(2);
  cluster.run_until(300.0);
  expect_sound(cluster);
  for (FragmentId p = 0; p < 6; ++p) EXPECT_GT(merges_with(cluster, "learner-2", p, 200.0), 3u) << p;
  EXPECT_GT(cluster.learner(2)->stats().clock, 250u);  // it caught up in clock without pretending to have worked
  EXPECT_LT(cluster.learner(2)->stats().steps, 80u);
}

TEST(Faults, TheSyncerRestartsWithoutStateAndTheWeightsComeBack) {
  Cluster cluster(cluster_of({1.0, 1.2}));
  cluster.run_until(200.0);
  const auto version = cluster.syncer()->fragment(0)->version;
  EXPECT_EQ(version.epoch, 1u);
  cluster.kill_syncer();
  cluster.run_until(220.0);
  EXPECT_GT(cluster.steps(0), 215u);  // training went on
  const auto away = cluster.merges().size();
  cluster.start_syncer();
  cluster.run_until(400.0);
  expect_sound(cluster);
  EXPECT_EQ(cluster.syncer()->epoch(), 2u);
  EXPECT_GT(cluster.syncer()->fragment(0)->version.n, version.n);  // n goes on, it does not begin again
  EXPECT_GT(cluster.merges().size(), away + 50);
  // The bowl's bottom is at 1; fresh weights would be between -0.5 and 0.5.
  double sum = 0.0;
  for (std::size_t i = 0; i < 20; ++i) sum += cluster.syncer()->fragment(0)->theta->f32()[i];
  EXPECT_NEAR(sum / 20.0, 1.0, 0.2);
}

// However long the syncer was away: what comes back are the weights the learners hold, so nothing is too old for them.
class LongOutage : public ::testing::TestWithParam<Adopt> {};

TEST_P(LongOutage, ItsWorkIsMergedAfterARestart) {
  auto options = cluster_of({1.0, 1.2});
  options.settings.adopt = GetParam();
  Cluster cluster(options);
  cluster.run_until(200.0);
  const double before = cluster.merged_fraction("learner-0");
  cluster.kill_syncer();
  cluster.run_until(600.0);  // eight times what may be carried over a foreign version (4 * 12 steps)
  cluster.start_syncer();
  cluster.run_until(800.0);
  expect_sound(cluster);
  for (const std::size_t i : {0, 1}) {
    EXPECT_EQ(cluster.learner(i)->stats().discarded.count("carry_limit"), 0u) << "learner " << i;
    EXPECT_GT(cluster.merged_fraction("learner-" + std::to_string(i)), before) << "learner " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Adoptions, LongOutage, ::testing::Values(Adopt::kRebase, Adopt::kOverwrite, Adopt::kBlend));

TEST(Faults, AFrozenLearnerIsNotWaitedForAndNotCountedTwice) {
  Cluster cluster(cluster_of({1.0, 1.0}));
  cluster.run_until(60.0);
  cluster.freeze_learner(1, true);
  cluster.run_until(180.0);
  const auto merged = cluster.merges().size();
  EXPECT_GT(merged, 70u);
  cluster.freeze_learner(1, false);
  cluster.run_until(300.0);
  expect_sound(cluster);
  EXPECT_GT(merges_with(cluster, "learner-1", 0, 190.0), 3u);
}

TEST(Faults, APartitionedLearnerTrainsOnAndReturns) {
  Cluster cluster(cluster_of({1.0, 1.0}));
  cluster.run_until(60.0);
  cluster.partition_learner(1, true);
  cluster.run_until(120.0);
  EXPECT_GT(cluster.steps(1), 115u);
  cluster.partition_learner(1, false);
  cluster.run_until(240.0);
  expect_sound(cluster);
  EXPECT_GT(merges_with(cluster, "learner-1", 0, 130.0), 3u);
}

TEST(Faults, PoisonNeverReachesTheGlobalWeights) {
  Cluster cluster(cluster_of({1.0, 1.0}));
  cluster.run_until(60.0);
  cluster.poison(1);
  cluster.run_until(200.0);
  expect_sound(cluster);
  for (FragmentId p = 0; p < 6; ++p) {
    const auto state = cluster.syncer()->fragment(p);
    for (std::size_t i = 0; i < state->theta->size() / 4; ++i) ASSERT_TRUE(std::isfinite(state->theta->f32()[i]));
  }
  ASSERT_NE(cluster.learner(1), nullptr);
  for (std::size_t t = 0; t < 6; ++t) {
    for (const float value : cluster.parameters(1, t)) EXPECT_TRUE(std::isfinite(value));  // it took them again
  }
  EXPECT_GT(merges_with(cluster, "learner-1", 0, 90.0), 2u);  // and is merged again
}

TEST(Faults, ALearnerThatStaysPoisonedIsEjected) {
  Cluster cluster(cluster_of({1.0, 1.0}));
  cluster.run_until(60.0);
  for (int i = 0; i < 100; ++i) {
    cluster.poison(1);
    cluster.run_until(60.0 + i);
  }
  expect_sound(cluster);
  EXPECT_EQ(cluster.learner(1)->stats().state, "rejected");
  EXPECT_GT(merges_with(cluster, "learner-0", 0, 120.0), 1u);
}

TEST(Faults, PayloadMemoryStaysInItsBound) {
  auto options = cluster_of({1.0, 1.0, 1.0, 1.0});
  options.payload_memory_bytes = 3 * 192;  // three small payloads for four learners
  Cluster cluster(options);
  cluster.run_until(300.0);
  expect_sound(cluster);
  EXPECT_GT(cluster.merges().size(), 60u);
}

TEST(Faults, SigtermFinishesTheOpenRound) {
  auto options = cluster_of({1.0, 1.0});
  options.delay_s = 0.3;
  Cluster cluster(options);
  cluster.run_until(100.2);
  cluster.stop_syncer(20.0);
  cluster.run_until(125.0);
  EXPECT_TRUE(cluster.syncer_stopped());
  expect_sound(cluster);
}

TEST(Faults, TwoLearnersWithOneIdTheLiveOneStays) {
  auto options = cluster_of({1.0, 1.0});
  options.learners[1].id = "learner-0";
  options.learners[1].start_s = 20.0;
  Cluster cluster(options);
  cluster.run_until(60.0);
  EXPECT_EQ(cluster.learner(0)->stats().state, "training");
  EXPECT_EQ(cluster.learner(1)->stats().state, "rejected");
}

TEST(Faults, AFrozenHolderOfAnIdIsSuperseded) {
  auto options = cluster_of({1.0, 1.0});
  options.learners[1].id = "learner-0";
  options.learners[1].start_s = 20.0;
  Cluster cluster(options);
  cluster.run_until(19.0);
  cluster.freeze_learner(0, true);
  cluster.run_until(40.0);
  EXPECT_EQ(cluster.learner(1)->stats().state, "training");
  cluster.freeze_learner(0, false);
  cluster.run_until(60.0);
  EXPECT_EQ(cluster.learner(0)->stats().state, "rejected");  // tombstoned: it cannot come back
  EXPECT_EQ(cluster.learner(1)->stats().state, "training");
}

TEST(Faults, AnotherModelIsRefusedNamingTheParameter) {
  auto options = cluster_of({1.0});
  Cluster cluster(options);
  cluster.run_until(5.0);
  LearnerCoreOptions other;
  other.learner_id = "other";
  other.incarnation = 77;
  other.layout = small_layout(3, 4, 6);
  const auto difference = first_difference(other.layout, options.layout);
  EXPECT_NE(difference.find("layer.0.weight"), std::string::npos);
  EXPECT_NE(difference.find("(4, 6)"), std::string::npos);
  EXPECT_NE(difference.find("(4, 5)"), std::string::npos);
}

}  // namespace
}  // namespace diloco::sim
