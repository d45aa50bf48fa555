// A learner killed and started again is a new life under the same id: what the syncer keeps of the earlier ones, and
// what happens when one of them was not dead after all.
#include <nlohmann/json.hpp>

#include "sim/clusters.h"

namespace diloco::sim {
namespace {

using nlohmann::json;

json learner_of(const json& status, const std::string& id) {
  json found;
  for (const auto& one : status["learners"]) {
    if (one["id"] != id) continue;
    EXPECT_TRUE(found.is_null()) << id << " is listed twice";
    found = one;
  }
  return found;
}

std::uint64_t merged_in_all(const Cluster& cluster) {
  std::uint64_t tokens = 0;
  for (const auto& merge : cluster.merges()) {
    for (const auto& member : merge.members) tokens += member.to - member.from;
  }
  return tokens;
}

std::uint64_t sum_over_learners(const json& status, const char* key) {
  std::uint64_t sum = 0;
  for (const auto& one : status["learners"]) sum += one["ledger"][key].get<std::uint64_t>();
  return sum;
}

TEST(Lives, ALearnersLivesAreOneRowAndOneLedger) {
  constexpr std::uint64_t kFragments = 6;
  Cluster cluster(cluster_of({1.0, 1.0, 1.5}));
  TimePoint t = 60.0;
  cluster.run_until(t);
  std::size_t size_of_few = 0, size = 0;
  std::uint64_t earlier = 0;  // processed by learner-2's ended lives
  for (std::uint64_t lives = 1; lives <= 40; ++lives) {
    const json now = status(cluster);
    size = now.dump().size();
    if (lives == 5) size_of_few = size;
    EXPECT_EQ(now["learners"].size(), 3u);
    const json victim = learner_of(now, "learner-2");
    EXPECT_EQ(victim["lives"], lives);
    EXPECT_EQ(victim["ledger"]["processed"], earlier + kFragments * victim["tokens"].get<std::uint64_t>());
    EXPECT_EQ(now["ledger"]["processed"], sum_over_learners(now, "processed"));
    EXPECT_EQ(now["ledger"]["merged"], sum_over_learners(now, "merged"));
    EXPECT_EQ(now["ledger"]["merged"], merged_in_all(cluster));
    cluster.kill_learner(2);
    cluster.run_until(t += 3.0);
    const json gone = learner_of(status(cluster), "learner-2");
    EXPECT_EQ(gone["state"], "gone");
    earlier += kFragments * gone["tokens"].get<std::uint64_t>();
    cluster.start_learner(2);
    cluster.run_until(t += 30.0);
  }
  EXPECT_LT(size, size_of_few + 100);  // numbers become longer, nothing else
  expect_sound(cluster);
}

// Cut off until the syncer had given it up and a second life had come and gone, then back: as if never away.
TEST(Lives, AnEarlierLifeThatComesBackGoesOnWhereItWas) {
  auto options = cluster_of({1.0, 1.0, 1.0});
  options.learners[2].id = "learner-1";
  options.learners[2].start_s = 80.0;
  Cluster cluster(options);
  cluster.run_until(60.0);
  cluster.partition_learner(1, true);
  cluster.run_until(79.0);
  const json before = learner_of(status(cluster), "learner-1");
  EXPECT_EQ(before["state"], "gone");
  cluster.run_until(140.0);
  const json second = learner_of(status(cluster), "learner-1");
  EXPECT_NE(second["incarnation"], before["incarnation"]);
  EXPECT_EQ(second["lives"], 2);
  EXPECT_EQ(second["ledger"]["processed"],
            6 * (before["tokens"].get<std::uint64_t>() + second["tokens"].get<std::uint64_t>()));
  cluster.kill_learner(2);
  cluster.run_until(145.0);
  const std::uint64_t of_second = learner_of(status(cluster), "learner-1")["tokens"];
  cluster.partition_learner(1, false);
  cluster.run_until(300.0);
  const json now = status(cluster);
  const json back = learner_of(now, "learner-1");
  EXPECT_EQ(back["incarnation"], before["incarnation"]);
  EXPECT_EQ(back["state"], "live");
  EXPECT_EQ(back["lives"], 2);
  EXPECT_EQ(back["ledger"]["processed"], 6 * (back["tokens"].get<std::uint64_t>() + of_second));
  EXPECT_EQ(now["ledger"]["processed"], sum_over_learners(now, "processed"));
  EXPECT_GT(merges_with(cluster, "learner-1", 0, 160.0), 3u);
  EXPECT_EQ(now["ledger"]["merged"], merged_in_all(cluster));
  expect_sound(cluster);
}

// A frozen holder of an id that a newcomer has replaced may not come back, so nothing it sent is kept.
TEST(Lives, WhatAReplacedLifeHadSentIsLetGo) {
  auto options = cluster_of({1.0, 1.0, 1.0});
  options.settings.min_quorum = 2;
  options.learners[2].id = "learner-0";
  options.learners[2].start_s = 35.0;
  Cluster cluster(options);
  cluster.run_until(30.0);
  cluster.freeze_learner(1, true);  // its contributions are waited for
  cluster.run_until(33.5);
  cluster.freeze_learner(0, true);
  cluster.run_until(34.5);
  const json held = status(cluster);
  EXPECT_GT(held["ledger"]["in_flight"], 0);
  TimePoint t = 34.5;
  while (learner_of(status(cluster), "learner-0")["lives"] != 2 && t < 60.0) cluster.run_until(t += 0.05);
  EXPECT_LT(t, 38.0);
  EXPECT_EQ(status(cluster)["ledger"]["in_flight"], 0);
  cluster.freeze_learner(0, false);
  cluster.freeze_learner(1, false);
  cluster.run_until(120.0);
  EXPECT_EQ(cluster.learner(0)->stats().state, "rejected");
  EXPECT_EQ(status(cluster)["ledger"]["merged"], merged_in_all(cluster));
  expect_sound(cluster);
}

}  // namespace
}  // namespace diloco::sim
