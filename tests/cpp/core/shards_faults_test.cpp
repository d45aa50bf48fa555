// One shard of several dies, one learner of several dies.
#include "core/shard_harness.h"

namespace diloco::test {
namespace {

std::vector<FragmentId> fragments_of(const Plan& plan, std::uint32_t shard) {
  std::vector<FragmentId> out;
  for (FragmentId p = 0; p < plan.size(); ++p) {
    if (plan.fragments[p].shard == shard) out.push_back(p);
  }
  return out;
}

void expect_everybody_merged(const ShardHarness& run, TimePoint since, const std::vector<FragmentId>& fragments) {
  for (std::size_t i = 0; i < run.learners(); ++i) {
    for (const FragmentId p : fragments) {
      EXPECT_GT(run.merged_since(since, p, "learner-" + std::to_string(i)), 1u) << "learner " << i << " fragment " << p;
    }
  }
}

TEST(ShardFaults, WhileOneShardIsAwayTheOthersGoOn) {
  for (const std::uint32_t shards : {2u, 3u}) {
    ShardHarness run(short_run(), shards, 3);
    run.start();
    run.run_until(40.0);
    const Plan plan = *run.learner(0).plan();
    const std::uint64_t epoch = run.shard(1).epoch();
    std::vector<Version> newest;  // any learner's, by fragment
    for (FragmentId p = 0; p < plan.size(); ++p) {
      newest.push_back({});
      for (std::size_t i = 0; i < 3; ++i) newest[p] = std::max(newest[p], run.learner(i).stats().versions[p]);
    }
    run.kill_shard(1);
    run.run_until(70.0);
    for (std::size_t i = 0; i < run.learners(); ++i) {
      EXPECT_EQ(run.learner(i).stats().state, "away");
      EXPECT_EQ(run.learner(i).stats().shards_away, std::vector<std::uint32_t>{1});
      EXPECT_FALSE(run.learner(i).joined());
    }
    for (std::uint32_t s = 0; s < shards; ++s) {
      if (s != 1) expect_everybody_merged(run, 45.0, fragments_of(plan, s));
    }
    for (const FragmentId p : fragments_of(plan, 1)) EXPECT_EQ(run.merged_since(40.0, p), 0u);

    run.start_shard(1);
    run.run_until(140.0);
    EXPECT_GT(run.shard(1).epoch(), epoch);
    EXPECT_EQ(run.shard(0).epoch(), epoch);  // epochs are a shard's own
    for (const FragmentId p : fragments_of(plan, 1)) {
      EXPECT_GT(run.shard(1).fragment(p)->version.n, newest[p].n);  // it went on from where the learners were
    }
    EXPECT_EQ(run.lines_with("shard 1: the global weights are recovered from the learners' anchors"), 1u);
    EXPECT_EQ(run.lines_with("that progress is lost"), 0u);
    for (std::uint32_t s = 0; s < shards; ++s) expect_everybody_merged(run, 80.0, fragments_of(plan, s));
    for (std::size_t i = 0; i < run.learners(); ++i) {
      EXPECT_EQ(run.learner(i).stats().state, "training");
      EXPECT_EQ(run.learner(i).stats().reconnects, 1u);
      EXPECT_EQ(run.learner(i).stats().epoch, run.shard(1).epoch());
    }
    EXPECT_EQ(run.lines_with("learner-0: no shard 1 of the syncer at harness"), 1u);
    EXPECT_EQ(run.lines_with("learner-0: the shard 1 of the syncer at harness is back"), 1u);
    EXPECT_TRUE(run.ends().empty());
    run.expect_sound(plan);
  }
}

// What was sent to one shard and waits to be merged stays known, however often the other one says WELCOME.
TEST(ShardFaults, AConnectionThatKeepsBreakingTouchesNoOtherShard) {
  ShardHarness run(short_run(), 2, 2);
  run.start();
  run.run_until(20.0);
  const Plan plan = *run.learner(0).plan();
  for (TimePoint t = 20.0; t < 80.0; t += 0.37) {
    run.run_until(t);
    run.feed_learner(0, ChannelDown{Channel::kControl, "reset", 1});
  }
  run.run_until(120.0);
  EXPECT_GT(run.learner(0).stats().reconnects, 20u);
  EXPECT_EQ(run.lines_with("from a copy that is no longer here"), 0u);
  EXPECT_TRUE(run.learner(0).stats().discarded.empty());
  expect_everybody_merged(run, 20.0, fragments_of(plan, 0));
  expect_everybody_merged(run, 90.0, fragments_of(plan, 1));
  run.expect_sound(plan);
}

TEST(ShardFaults, AKilledLearnerComesBackToAllShards) {
  ShardHarness run(short_run(), 2, 3);
  run.start();
  run.run_until(40.0);
  const Plan plan = *run.learner(0).plan();
  run.kill_learner(2);
  run.run_until(60.0);
  for (FragmentId p = 0; p < plan.size(); ++p) {
    EXPECT_EQ(run.merged_since(45.0, p, "learner-2"), 0u);
    EXPECT_GT(run.merged_since(45.0, p, "learner-0"), 1u);
  }
  run.start_learner(2);
  run.run_until(120.0);
  EXPECT_EQ(run.learner(2).stats().state, "training");
  EXPECT_TRUE(run.learner(2).joined());
  for (std::uint32_t s = 0; s < run.shards(); ++s) {
    expect_everybody_merged(run, 70.0, fragments_of(plan, s));
    const auto learners = run.status(s)["learners"];
    for (const auto& learner : learners) {
      EXPECT_EQ(learner["lives"], learner["id"] == "learner-2" ? 2 : 1);
    }
  }
  run.expect_sound(plan);
}

TEST(ShardFaults, InLockstepAllWaitForAShardThatIsAway) {
  Settings settings = short_run();
  settings.mode = Mode::kLockstep;
  settings.adopt = Adopt::kOverwrite;
  settings.min_quorum = 2;
  ShardHarness run(settings, 2, 2);
  run.start();
  run.run_until(40.0);
  const Plan plan = *run.learner(0).plan();
  run.kill_shard(1);
  run.run_until(60.0);
  std::vector<std::uint64_t> steps;
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(run.held(i));
    const std::string what = run.learner(i).holding_for();
    EXPECT_EQ(plan.fragments.at(std::stoul(what.substr(what.find(' ')))).shard, 1u) << what;
    steps.push_back(run.learner(i).stats().steps);
  }
  run.run_until(70.0);
  EXPECT_EQ(run.learner(0).stats().steps, steps[0]);
  run.start_shard(1);
  run.run_until(130.0);
  EXPECT_GT(run.learner(0).stats().steps, steps[0] + 30);
  for (std::uint32_t s = 0; s < 2; ++s) expect_everybody_merged(run, 80.0, fragments_of(plan, s));
  EXPECT_TRUE(run.ends().empty());
  run.expect_sound(plan);
}

// Part of the model would never be synchronised, so one shard is enough to give up.
TEST(ShardFaults, GivesUpForOneShardThatStaysAway) {
  ShardHarness run(short_run(), 2, 2);
  run.change_learner = [](std::size_t i, LearnerCoreOptions& options) { options.give_up_after_s = i == 0 ? 20.0 : 0.0; };
  run.start();
  run.run_until(30.0);
  run.kill_shard(1);
  run.run_until(49.0);
  EXPECT_TRUE(run.ends().empty());
  run.run_until(51.0);
  ASSERT_EQ(run.ends().size(), 1u);
  EXPECT_EQ(run.ends()[0], "learner-0: no shard 1 of the syncer at harness for 20.0 s (give_up_after_s); start it, or raise "
                           "the limit");
  EXPECT_EQ(run.learner(0).stats().state, "rejected");
  EXPECT_EQ(run.learner(0).stats().shards_away, (std::vector<std::uint32_t>{0, 1}));  // it has left shard 0 too
  EXPECT_EQ(run.learner(1).stats().state, "away");
}

// Never reached is no better than lost.
TEST(ShardFaults, GivesUpForOneShardThatWasNeverThere) {
  ShardHarness run(short_run(), 2, 1);
  run.change_learner = [](std::size_t, LearnerCoreOptions& options) { options.give_up_after_s = 20.0; };
  run.start_shard(0);
  run.start_learner(0);
  run.run_until(19.0);
  EXPECT_EQ(run.learner(0).stats().state, "joining");
  EXPECT_FALSE(run.learner(0).joined());
  const Plan plan = *run.learner(0).plan();  // from the one that is there
  for (const FragmentId p : fragments_of(plan, 0)) EXPECT_GT(run.merged_since(0.0, p), 0u);
  run.run_until(25.0);
  ASSERT_EQ(run.ends().size(), 1u);
  EXPECT_NE(run.ends()[0].find("no shard 1 of the syncer"), std::string::npos) << run.ends()[0];
}

}  // namespace
}  // namespace diloco::test
