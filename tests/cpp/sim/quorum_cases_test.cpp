// Quorum, grace and pace on the whole machine: what the pure functions of quorum_test.cpp decide, seen from outside.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "sim/clusters.h"

namespace diloco::sim {
namespace {

std::size_t lines_with(const Cluster& cluster, const std::string& words) {
  const auto& lines = cluster.log_lines();
  return static_cast<std::size_t>(std::count_if(
      lines.begin(), lines.end(), [&](const std::string& line) { return line.find(words) != std::string::npos; }));
}

std::size_t merges_after(const Cluster& cluster, TimePoint t) {
  return static_cast<std::size_t>(std::count_if(cluster.merges().begin(), cluster.merges().end(),
                                                [&](const MergeRecord& merge) { return merge.at > t; }));
}

std::map<std::string, std::size_t> reasons(const Cluster& cluster) {
  std::map<std::string, std::size_t> found;
  for (const auto& merge : cluster.merges()) ++found[merge.reason];
  return found;
}

TEST(QuorumCases, AllPresentClosesEarlyWhateverTheGrace) {
  for (const Grace grace : {Grace::kAdaptive, Grace::kFixed}) {
    auto options = cluster_of({1.0, 1.0, 1.0});
    options.settings.grace = grace;
    options.settings.grace_s = grace == Grace::kFixed ? 30.0 : 0.0;
    Cluster cluster(options);
    cluster.run_until(300.0);
    expect_sound(cluster);
    const auto found = reasons(cluster);
    EXPECT_GT(found.at("all_present"), 100u);
    EXPECT_EQ(found.size(), 1u);
  }
}

// Late for round after round: its work goes into later rounds, it is said, and the share of used work is shown.
TEST(QuorumCases, WhoIsAlwaysLateIsMergedLaterAndItIsSaid) {
  auto late = cluster_of({1.0, 1.0, 1.0}, 12, 2);
  late.settings.grace = Grace::kNone;
  late.learners[2].link = Link{1.0, 0.0, 0.0, 0.0};  // an answer takes two steps
  Cluster slow(late);
  slow.run_until(900.0);
  expect_sound(slow);
  EXPECT_GE(lines_with(slow, "was too late for 3 rounds of fragment"), 1u);
  EXPECT_GT(slow.merged_fraction("learner-2"), 0.8);
  const auto learners = status(slow)["learners"];
  for (const auto& learner : learners) {
    EXPECT_GT(learner["merged_fraction"].get<double>(), 0.8);
  }
}


// One learner's uploads take longer than the window: rounds close without them and say why.
ClusterOptions late_uploads(Grace grace) {
  auto options = cluster_of({1.0, 1.0, 1.0}, 24);
  options.settings.grace = grace;
  if (grace == Grace::kFixed) options.settings.grace_s = 0.5;
  if (grace == Grace::kAdaptive) options.settings.grace_cap_s = 0.25;
  options.learners[2].link = Link{0.01, 0.0, 400.0, 0.0};
  return options;
}

TEST(QuorumCases, EveryReasonIsRecorded) {
  const std::map<Grace, std::string> expected = {
      {Grace::kNone, "no_grace"}, {Grace::kFixed, "grace_elapsed"}, {Grace::kAdaptive, "cap"}};
  for (const auto& [grace, reason] : expected) {
    Cluster cluster(late_uploads(grace));
    cluster.run_until(900.0);
    expect_sound(cluster);
    EXPECT_GT(reasons(cluster)[reason], 0u) << reason;
    for (const auto& line : cluster.records()) {
      const auto json = nlohmann::json::parse(line);
      if (json["event"] != "merge") continue;
      const Seconds longest = grace == Grace::kFixed ? 0.5 : grace == Grace::kAdaptive ? 0.25 : 0.0;
      EXPECT_LE(json["wait_s"].get<double>(), longest + 1e-9) << line;
    }
  }
}

TEST(QuorumCases, ALearnerThatDiesDuringTheWaitDoesNotHoldTheOthersUp) {
  auto options = cluster_of({1.0, 1.0, 1.0});
  options.settings.min_quorum = 2;
  Cluster cluster(options);
  cluster.run_until(100.0);
  cluster.partition_learner(0, true);  // its death is told twice: silence, then the reset
  cluster.run_until(103.0);
  cluster.kill_learner(0);
  cluster.run_until(200.0);
  EXPECT_GT(merges_after(cluster, 110.0), 30u);  // two are enough
  cluster.kill_learner(1);
  cluster.run_until(300.0);
  EXPECT_EQ(merges_after(cluster, 210.0), 0u);  // one is not
  EXPECT_GE(lines_with(cluster, "waiting: 1 of 2 learners are here"), 1u);
  cluster.kill_learner(2);  // the last one
  cluster.run_until(330.0);
  for (std::size_t i = 0; i < 3; ++i) {
    if (i == 0) cluster.partition_learner(0, false);
    cluster.start_learner(i);
  }
  cluster.run_until(450.0);
  EXPECT_GT(merges_after(cluster, 350.0), 30u);
  expect_sound(cluster);
}

// K is that of the opening: a learner that joins in mid-round changes nothing about it.
TEST(QuorumCases, AJoinerInMidRoundLeavesTheQuorumAsItIs) {
  auto options = cluster_of({1.0, 1.0, 1.0});
  options.settings.min_quorum = 2;
  options.learners[1].start_s = 60.0;
  options.learners[2].start_s = 61.0;
  Cluster cluster(options);
  cluster.run_until(59.0);
  EXPECT_EQ(cluster.merges().size(), 0u);
  cluster.run_until(200.0);
  expect_sound(cluster);
  for (const auto& line : cluster.records()) {
    const auto json = nlohmann::json::parse(line);
    if (json["event"] == "open") {
      EXPECT_EQ(json["quorum"], 2);
    }
  }
  EXPECT_GT(cluster.merges().size(), 50u);
}

// On a fast network every fragment is synced each H steps; on one that cannot carry it, it is said what is effective.
TEST(QuorumCases, EffectivePeriodAndOverlapAreReported) {
  Cluster fast(cluster_of({1.0, 1.0}));
  fast.run_until(400.0);
  const auto quick = status(fast)["effective"];
  EXPECT_NEAR(quick["sync_every"].get<double>(), 12.0, 1.0);
  EXPECT_LT(quick["overlap_steps"].get<double>(), 1.0);
  EXPECT_EQ(lines_with(fast, "instead of sync_every"), 0u);

  auto options = cluster_of({1.0, 1.0});
  options.layout = small_layout(3, 16, 40);
  options.bytes_per_s = 500.0;
  Cluster narrow(options);
  narrow.run_until(1500.0);
  expect_sound(narrow);
  const auto slow = status(narrow)["effective"];
  EXPECT_GT(slow["sync_every"].get<double>(), 18.0);
  EXPECT_GT(slow["overlap_steps"].get<double>(), 2.0);
  EXPECT_EQ(lines_with(narrow, "instead of sync_every = 12"), 1u);
}

// What is left over from the last round does not close the next one before one of those who were just asked can answer:
// rounds of one learner and rounds of all others' old work would alternate for ever.
TEST(QuorumCases, NoRoundIsMadeOfLeftOversAlone) {
  for (const Grace grace : {Grace::kNone, Grace::kAdaptive}) {
    auto options = cluster_of({1.0, 1.0, 1.0, 1.0}, 24);
    options.settings.grace = grace;
    options.delay_s = 0.3;
    for (auto& learner : options.learners) learner.jitter = 0.1;
    Cluster cluster(options);
    cluster.run_until(1500.0);
    expect_sound(cluster);
    EXPECT_GT(cluster.merges().size(), 300u);
    for (const auto& line : cluster.records()) {
      const auto json = nlohmann::json::parse(line);
      if (json["event"] != "merge") continue;
      EXPECT_GE(json["quorum_s"].get<double>(), 0.6) << line;  // there and back
    }
    for (std::size_t i = 0; i < 4; ++i) EXPECT_GT(cluster.merged_fraction("learner-" + std::to_string(i)), 0.9) << i;
  }
}

// Async runs with outer momentum overshoot: four learners, one of them four times as slow.
TEST(QuorumCases, AsynchronousMomentumStaysBounded) {
  const auto distance_and_norm = [](const std::string& preset, std::map<std::string, std::string> given) {
    auto options = cluster_of({1.0, 1.0, 1.0, 4.0}, 10, 1);
    options.settings = {};
    options.settings.set("preset", preset);
    for (const auto& [name, value] : given) options.settings.set(name, value);
    options.settings.set("sync_every", "10");
    options.settings.set("num_fragments", "1");
    Cluster cluster(options);
    cluster.run_until(2000.0);
    expect_sound(cluster);
    double worst = 0.0;
    for (const auto& tensor : cluster.global_parameters()) {
      for (const float value : tensor) worst = std::max(worst, std::fabs(static_cast<double>(value) - 1.0));
    }
    double largest_late_update = 0.0;
    for (const auto& line : cluster.records()) {
      const auto json = nlohmann::json::parse(line);
      if (json["event"] == "merge" && json["t"] > 1000.0) {
        largest_late_update = std::max(largest_late_update, json["delta_norm"].get<double>());
      }
    }
    EXPECT_GE(cluster.merges().size(), 45u);
    return std::pair(worst, largest_late_update);
  };
  const auto synchronous = distance_and_norm("diloco", {});
  const auto delayed = distance_and_norm("async", {});
  const auto plain = distance_and_norm("async", {{"outer_optimizer", "sgd"}, {"outer_momentum", "0"},
                                                 {"outer_delay_c", "0"}});
  for (const auto& [distance, norm] : {delayed, plain}) {
    EXPECT_LT(distance, 2.0 * synchronous.first + 0.2);
    EXPECT_LT(norm, 2.0 * synchronous.second + 0.2);
  }
}

// A run that learners with another learning-rate schedule join is told so.
TEST(QuorumCases, AJoinerLearnsHowFarTheRunIs) {
  auto options = cluster_of({1.0, 1.0});
  options.learners[1].start_s = 200.0;
  Cluster cluster(options);
  cluster.run_until(230.0);
  const auto stats = cluster.learner(1)->stats();
  EXPECT_NEAR(static_cast<double>(stats.run_clock), 200.0, 3.0);
  EXPECT_NEAR(static_cast<double>(stats.run_tokens), 200.0 * 100, 300.0);
  EXPECT_EQ(cluster.learner(0)->stats().run_tokens, 0u);
}

}  // namespace
}  // namespace diloco::sim
