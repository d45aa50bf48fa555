// A run goes on with other learners than it was left by, and with a syncer that is not where the learners left it.
#include <cstring>

#include <nlohmann/json.hpp>

#include "sim/clusters.h"

namespace diloco::sim {
namespace {

using nlohmann::json;

// Whatever is global of a fragment: weights, outer state, counters.
std::string state_of(Cluster& cluster) {
  std::string all;
  for (FragmentId p = 0; p < cluster.syncer()->plan().size(); ++p) {
    const auto state = cluster.syncer()->fragment(p);
    all += to_string(state->version) + "/" + std::to_string(state->outer_steps) + "/";
    for (const auto& buffer : {state->theta, state->outer_state}) {
      all.append(reinterpret_cast<const char*>(buffer->data()), buffer->size());
    }
  }
  return all;
}

bool moves(const BufferPtr& momentum) {
  for (std::size_t i = 0; i < momentum->size() / sizeof(float); ++i) {
    if (momentum->f32()[i] != 0.0f) return true;
  }
  return false;
}

// Four leave, two of them come, then six. Nothing of the syncer's state counts learners.
TEST(Resume, WithAnotherNumberOfLearnersTheOuterMomentumIsKept) {
  auto options = cluster_of(std::vector<Seconds>(8, 1.0));
  options.settings.outer_optimizer = OuterKind::kNesterov;
  options.settings.outer_lr = 0.5;
  options.settings.outer_momentum = 0.6;
  for (std::size_t i = 4; i < 8; ++i) options.learners[i].start_s = 330.0;  // not seen before
  Cluster cluster(options);
  const auto learner = [&](const std::string& id) {
    const json status = json::parse(cluster.syncer()->status_json(cluster.now()));
    for (const auto& one : status["learners"]) {
      if (one["id"] == id) return one;
    }
    return json();
  };
  const auto leave = [&](std::vector<std::size_t> who) {
    for (const std::size_t i : who) cluster.kill_learner(i);
    cluster.run_until(cluster.now() + 15.0);  // what was under way is merged, or not
  };
  const auto outer_steps = [&] { return cluster.syncer()->fragment(0)->outer_steps; };

  cluster.run_until(150.0);
  leave({0, 1, 2, 3});
  const std::string of_four = state_of(cluster);
  const std::uint64_t steps_of_four = outer_steps();
  ASSERT_TRUE(moves(cluster.syncer()->fragment(0)->outer_state));
  EXPECT_GT(steps_of_four, 8u);
  cluster.run_until(200.0);
  EXPECT_EQ(state_of(cluster), of_four);  // nobody is there, nothing changes

  for (const std::size_t i : {0, 1}) cluster.start_learner(i);
  cluster.run_until(202.0);
  EXPECT_EQ(state_of(cluster), of_four);  // they take it as it is
  EXPECT_EQ(cluster.learner(0)->stats().versions[0], cluster.syncer()->fragment(0)->version);
  cluster.run_until(300.0);
  EXPECT_GT(outer_steps(), steps_of_four + 5);
  leave({0, 1});
  const std::string of_two = state_of(cluster);
  EXPECT_EQ(of_two.size(), of_four.size());
  const std::uint64_t steps_of_two = outer_steps();

  cluster.run_until(330.0);
  EXPECT_EQ(state_of(cluster), of_two);
  for (const std::size_t i : {0, 1}) cluster.start_learner(i);  // and four new ones start by themselves
  cluster.run_until(450.0);
  EXPECT_GT(outer_steps(), steps_of_two + 7);
  EXPECT_EQ(cluster.syncer()->epoch(), 1u);
  for (const std::size_t i : {0, 1, 4, 5, 6, 7}) {
    const json one = learner("learner-" + std::to_string(i));
    EXPECT_EQ(one["state"], "live") << i;
    EXPECT_EQ(one["lives"], i < 2 ? 3 : 1) << i;  // returning ids are known, new ones are fresh
    EXPECT_GT(merges_with(cluster, "learner-" + std::to_string(i), 0, 340.0), 3u) << i;
  }
  // Every outer step of fragment 0 was made on one and the same momentum.
  std::uint64_t merges = 0;
  for (const auto& merge : cluster.merges()) merges += merge.fragment == 0;
  EXPECT_EQ(outer_steps(), merges);
  expect_sound(cluster);
}

bool said(const Cluster& cluster, const std::string& who, const std::string& words) {
  for (const auto& line : cluster.log_lines()) {
    if (line.rfind(who, 0) == 0 && line.find(words) != std::string::npos) return true;
  }
  return false;
}

// learner-0 was cut off early and holds old versions; the others, with newer ones, are gone when the syncer comes back
// without state. So the run is rolled back to what learner-0 holds; learner-1, which holds more, returns too late.
TEST(Resume, ALearnerAheadOfARolledBackSyncerIsTakenBackAndToldBothVersions) {
  for (const Adopt adopt : {Adopt::kRebase, Adopt::kOverwrite}) {
    auto options = cluster_of({1.0, 1.0, 1.0});
    options.settings.adopt = adopt;
    Cluster cluster(options);
    cluster.run_until(100.0);
    cluster.partition_learner(0, true);
    cluster.run_until(112.0);
    const Version old = cluster.learner(0)->stats().versions[0];
    cluster.run_until(300.0);
    cluster.partition_learner(1, true);
    cluster.kill_learner(2);
    const Version late = cluster.learner(1)->stats().versions[0];
    ASSERT_GT(late.n, old.n + 5);
    cluster.kill_syncer();
    cluster.start_syncer();
    cluster.partition_learner(0, false);
    cluster.run_until(360.0);
    const Version there = cluster.syncer()->fragment(0)->version;
    EXPECT_EQ(there.epoch, 2u);
    EXPECT_LT(there.n, late.n);
    cluster.partition_learner(1, false);
    cluster.run_until(400.0);
    // What the syncer and the learner say: both versions, and what was done.
    EXPECT_TRUE(said(cluster, "", "learner 'learner-1' holds the later version " + to_string(late)));
    EXPECT_TRUE(said(cluster, "learner-1", "fragment 0: " + to_string(late) + " here, 2."));
    EXPECT_TRUE(said(cluster, "learner-1", "it was rolled back. Its weights are taken"));
    cluster.run_until(500.0);
    const Version now = cluster.learner(1)->stats().versions[0];
    EXPECT_EQ(now.epoch, 2u);
    EXPECT_GT(merges_with(cluster, "learner-1", 0, 400.0), 3u);
    expect_sound(cluster);  // every merged change was one against a version that this life of the syncer gave out
  }
}

// Who comes back to a syncer that went on is told so, once, and asked for nothing it has not got.
TEST(Resume, ALearnerBehindIsToldWhatTheRunHasReached) {
  Cluster cluster(cluster_of({1.0, 1.0}));
  cluster.run_until(100.0);
  const Version here = cluster.learner(1)->stats().versions[0];
  cluster.partition_learner(1, true);
  cluster.run_until(200.0);
  cluster.partition_learner(1, false);
  cluster.run_until(260.0);
  std::size_t lines = 0;
  for (const auto& line : cluster.log_lines()) lines += line.find("has gone on with 6 fragment(s)") != std::string::npos;
  EXPECT_EQ(lines, 1u);
  EXPECT_TRUE(said(cluster, "learner-1", " here, 1."));
  EXPECT_GT(cluster.learner(1)->stats().versions[0].n, here.n + 5);
  expect_sound(cluster);
}

// A syncer without state, and everybody holding the same: nothing was lost, and nobody says so.
TEST(Resume, NobodySpeaksOfARollbackWhenNothingWasLost) {
  Cluster cluster(cluster_of({1.0, 1.2}));
  cluster.run_until(200.0);
  cluster.kill_syncer();
  cluster.run_until(220.0);
  cluster.start_syncer();
  cluster.run_until(300.0);
  EXPECT_FALSE(said(cluster, "", "rolled back"));
  EXPECT_TRUE(said(cluster, "learner-", "the newest that any learner holds will be taken"));
  expect_sound(cluster);
}

}  // namespace
}  // namespace diloco::sim
