// Undisturbed clusters: who is merged, how often, and that nobody waits.
#include <cmath>

#include "sim/clusters.h"

namespace diloco::sim {
namespace {

TEST(Steady, OneLearnerIsMergedWhole) {
  Cluster cluster(cluster_of({1.0}));
  cluster.run_until(400.0);
  expect_sound(cluster);
  EXPECT_GT(cluster.merged_fraction("learner-0"), 0.9);
  EXPECT_GE(cluster.steps(0), 399u);  // it never waited
}

TEST(Steady, NobodyIsStarvedWhateverItsSpeed) {
  // The obvious rules starve all but the K-th fastest: 18 % and 3x slower learners, and equal ones with jitter.
  auto options = cluster_of({1.0, 1.18, 3.0, 1.0});
  options.learners[3].jitter = 0.1;
  Cluster cluster(options);
  cluster.run_until(600.0);
  expect_sound(cluster);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_GT(cluster.merged_fraction("learner-" + std::to_string(i)), 0.85) << i;
    for (FragmentId p = 0; p < 6; ++p) EXPECT_GT(merges_with(cluster, "learner-" + std::to_string(i), p), 10u);
  }
}

TEST(Steady, EveryFragmentIsMergedOncePerPeriod) {
  Cluster cluster(cluster_of({1.0, 1.0}));
  cluster.run_until(12.0 * 40);
  expect_sound(cluster);
  std::map<FragmentId, int> rounds;
  for (const auto& merge : cluster.merges()) ++rounds[merge.fragment];
  for (FragmentId p = 0; p < 6; ++p) {
    EXPECT_GE(rounds[p], 37) << p;
    EXPECT_LE(rounds[p], 41) << p;
  }
}

TEST(Steady, LearnersEndUpNearEachOther) {
  auto options = cluster_of({1.0, 1.3});
  options.settings.merge = MergeKind::kMean;  // opposite directions cancel in RDA, which is not the point here
  options.learners[0].target = 0.0f;
  options.learners[1].target = 2.0f;
  options.learning_rate = 0.01;
  Cluster cluster(options);
  cluster.run_until(800.0);
  expect_sound(cluster);
  double a = 0.0, b = 0.0;
  for (const float value : cluster.parameters(0, 0)) a += value;
  for (const float value : cluster.parameters(1, 0)) b += value;
  const double n = static_cast<double>(cluster.parameters(0, 0).size());
  EXPECT_NEAR(a / n, b / n, 0.4);  // apart: 2.0
  EXPECT_NEAR(a / n, 1.0, 0.5);    // between the two targets
}

TEST(Steady, QuorumIsNeverUndercut) {
  auto options = cluster_of({1.0, 1.5, 2.0});
  options.settings.min_quorum = 3;
  Cluster cluster(options);
  cluster.run_until(400.0);
  expect_sound(cluster);  // check() knows K
  EXPECT_GT(cluster.merges().size(), 20u);
  EXPECT_EQ(cluster.merges().back().members.size(), 3u);
}

TEST(Steady, TooFewLearnersWaitAndSaySo) {
  auto options = cluster_of({1.0, 1.0});
  options.settings.min_quorum = 3;
  Cluster cluster(options);
  cluster.run_until(100.0);
  EXPECT_TRUE(cluster.merges().empty());
  EXPECT_GT(cluster.steps(0), 95u);
  EXPECT_NE(cluster.syncer()->status_json(cluster.now()).find("2 of 3 learners"), std::string::npos);
}

TEST(Steady, OverwriteAndBlendKeepTheirAccounts) {
  for (const Adopt adopt : {Adopt::kOverwrite, Adopt::kBlend}) {
    auto options = cluster_of({1.0, 1.4, 3.0});
    options.settings.adopt = adopt;
    Cluster cluster(options);
    cluster.run_until(500.0);
    expect_sound(cluster);
    EXPECT_GT(cluster.merged_fraction("learner-0"), 0.5);
    EXPECT_GT(cluster.merged_fraction("learner-2"), 0.3);
  }
}

TEST(Steady, SlowNarrowLinksMergeLateWorkAllTheSame) {
  auto options = cluster_of({0.5, 0.6});
  options.delay_s = 0.4;
  options.bytes_per_s = 2000.0;
  Cluster cluster(options);
  cluster.run_until(400.0);
  expect_sound(cluster);
  EXPECT_GT(cluster.merged_fraction("learner-0"), 0.6);
  EXPECT_GT(cluster.merged_fraction("learner-1"), 0.6);
}

TEST(Steady, SameSeedSameBytes) {
  const auto run = [] {
    auto options = cluster_of({1.0, 1.3, 2.1});
    options.learners[1].jitter = 0.3;
    Cluster cluster(options);
    cluster.run_until(200.0);
    return std::pair(cluster.records(), cluster.parameters(1, 0));
  };
  EXPECT_EQ(run(), run());
}

TEST(Lockstep, HoldsUntilTheFragmentIsThereAndMergesEverything) {
  for (const std::uint32_t tau : {0u, 2u}) {
    auto options = cluster_of({1.0, 1.5}, 6, 3);
    options.settings.mode = Mode::kLockstep;
    options.settings.min_quorum = 2;
    options.settings.overlap_steps = tau;
    options.settings.adopt = tau == 0 ? Adopt::kOverwrite : Adopt::kRebase;
    Cluster cluster(options);
    cluster.run_until(300.0);
    expect_sound(cluster);
    EXPECT_GT(cluster.merges().size(), 60u) << tau;
    for (const auto& merge : cluster.merges()) EXPECT_EQ(merge.members.size(), 2u);
    EXPECT_LE(cluster.steps(0), cluster.steps(1) + 3);  // the fast one waits
    EXPECT_GT(cluster.merged_fraction("learner-0"), 0.95) << tau;
  }
}

TEST(Lockstep, ALateLearnerJoinsWithoutADeadlock) {
  auto options = cluster_of({1.0, 1.0}, 6, 3);
  options.settings.mode = Mode::kLockstep;
  options.settings.overlap_steps = 2;
  options.learners[1].start_s = 40.0;
  Cluster cluster(options);
  cluster.run_until(200.0);
  expect_sound(cluster);
  EXPECT_GT(cluster.steps(0), 150u);
  EXPECT_GT(cluster.steps(1), 110u);
  EXPECT_GT(merges_with(cluster, "learner-1", 0), 10u);
}

}  // namespace
}  // namespace diloco::sim
