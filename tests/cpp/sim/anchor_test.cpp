// anchor = syncer with learners that are behind: earlier versions are kept as long as somebody works from them.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "sim/clusters.h"

namespace diloco::sim {
namespace {

ClusterOptions behind_by(double bytes_per_s) {
  auto options = cluster_of({1.0, 1.0, 3.0, 9.0});
  options.settings.anchor = Anchor::kSyncer;
  options.bytes_per_s = bytes_per_s;
  return options;
}

TEST(SyncerAnchorCluster, SlowLearnersAreMergedAndNoneIsTooStale) {
  for (const Adopt adopt : {Adopt::kRebase, Adopt::kOverwrite}) {
    auto options = behind_by(0.0);
    options.settings.adopt = adopt;
    Cluster cluster(options);
    cluster.run_until(600.0);
    expect_sound(cluster);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_GT(merges_with(cluster, "learner-" + std::to_string(i), 0), 5u) << i;
    for (const auto& record : cluster.records()) EXPECT_EQ(record.find("too far behind"), std::string::npos) << record;
  }
}

// The two anchors are the same for learners that are up to date, and only for those.
TEST(SyncerAnchorCluster, DiffersFromTheLearnersAnchorOnlyForTheLate) {
  const auto values = [](Anchor anchor, const std::vector<Seconds>& steps) {
    auto options = cluster_of(steps);
    options.settings.anchor = anchor;
    options.settings.adopt = Adopt::kOverwrite;
    Cluster cluster(options);
    cluster.run_until(200.0);
    return cluster.global_parameters();
  };
  EXPECT_EQ(values(Anchor::kLearner, {1.0, 1.0}), values(Anchor::kSyncer, {1.0, 1.0}));
  EXPECT_NE(values(Anchor::kLearner, {1.0, 9.0}), values(Anchor::kSyncer, {1.0, 9.0}));
}

std::uint64_t retained_bytes(Cluster& cluster) {
  return nlohmann::json::parse(cluster.syncer()->status_json(cluster.now()))["memory"]["retained_bytes"];
}

TEST(SyncerAnchorCluster, EarlierVersionsAreBoundedAndGiveWay) {
  Cluster cluster(behind_by(0.0));
  std::uint64_t most = 0;
  for (double t = 10.0; t < 600.0; t += 1.0) {
    cluster.run_until(t);
    most = std::max(most, retained_bytes(cluster));
  }
  EXPECT_GT(most, 0u);
  std::uint64_t model = 0;
  for (const auto& tensor : small_layout().tensors) model += (tensor.numel() * 4 + 63) / 64 * 64;
  EXPECT_LE(most, 8 * model);  // max_staleness
  cluster.kill_learner(2);
  cluster.kill_learner(3);
  cluster.run_until(660.0);
  EXPECT_LE(retained_bytes(cluster), 2 * model);
}

// A learner that nobody heard of for longer than max_staleness versions takes the new weights first.
TEST(SyncerAnchorCluster, AReturningLearnerIsTooStaleUntilItHasAdopted) {
  auto options = cluster_of({1.0, 1.0, 1.0});
  options.settings.anchor = Anchor::kSyncer;
  options.settings.max_staleness = 2;
  Cluster cluster(options);
  cluster.run_until(60.0);
  cluster.partition_learner(2, true);
  cluster.run_until(300.0);
  cluster.partition_learner(2, false);
  cluster.run_until(500.0);
  expect_sound(cluster);
  EXPECT_GT(merges_with(cluster, "learner-2", 0, 300.0), 3u);
}

}  // namespace
}  // namespace diloco::sim
