// Several syncer shards when nothing goes wrong.
#include "core/shard_harness.h"

namespace diloco::test {
namespace {

class Shards : public ::testing::TestWithParam<std::uint32_t> {};

TEST_P(Shards, EveryFragmentIsMergedByItsOwnShard) {
  ShardHarness run(short_run(), GetParam(), 3);
  run.start();
  run.run_until(90.0);
  const Plan plan = *run.learner(0).plan();
  ASSERT_EQ(plan.size(), 6u);
  for (std::size_t i = 0; i < run.learners(); ++i) {
    EXPECT_EQ(run.learner(i).stats().state, "training");
    EXPECT_TRUE(run.learner(i).stats().shards_away.empty());
    EXPECT_TRUE(run.learner(i).joined());
    for (FragmentId p = 0; p < plan.size(); ++p) {
      EXPECT_GE(run.merged_since(20.0, p, "learner-" + std::to_string(i)), 6u) << "learner " << i << " fragment " << p;
    }
  }
  for (std::uint32_t s = 0; s < run.shards(); ++s) {
    std::size_t owned = 0;
    for (FragmentId p = 0; p < plan.size(); ++p) {
      EXPECT_EQ(run.shard(s).fragment(p) != nullptr, plan.fragments[p].shard == s) << s << " " << p;
      owned += plan.fragments[p].shard == s;
    }
    const auto status = run.status(s);
    EXPECT_EQ(status["fragments"].size(), owned);
    for (const auto& fragment : status["fragments"]) EXPECT_EQ(fragment["shard"], s);
    for (const auto& learner : status["learners"]) {
      EXPECT_EQ(learner["ledger"]["processed"], owned * learner["tokens"].get<std::uint64_t>());
      for (FragmentId p = 0; p < plan.size(); ++p) {  // what is adopted of others' fragments is none of its concern
        EXPECT_EQ(learner["versions"][p][0] != 0, plan.fragments[p].shard == s);
      }
    }
    EXPECT_EQ(status["waiting"], "");
  }
  EXPECT_TRUE(run.ends().empty());
  run.expect_sound(plan);
}

INSTANTIATE_TEST_SUITE_P(Count, Shards, ::testing::Values(1u, 2u, 3u));

// In lockstep nothing depends on timing, so the weights may not depend on who keeps them.
TEST(ShardsInLockstep, MakeTheSameBitsAsOneShard) {
  std::vector<std::vector<float>> expected;
  for (const std::uint32_t shards : {1u, 2u, 3u}) {
    Settings settings = short_run();
    settings.mode = Mode::kLockstep;
    settings.adopt = Adopt::kOverwrite;
    settings.overlap_steps = 1;
    settings.min_quorum = 3;
    ShardHarness run(settings, shards, 3);
    run.start();
    run.run_until(100.0);
    const Plan plan = *run.learner(0).plan();
    std::vector<std::vector<float>> weights;
    for (FragmentId p = 0; p < plan.size(); ++p) {
      const auto state = run.shard(plan.fragments[p].shard).fragment(p);
      EXPECT_GE(state->version.n, 10u);
      weights.emplace_back(state->theta->f32(), state->theta->f32() + plan.fragments[p].numel);
    }
    if (expected.empty()) expected = weights;
    EXPECT_EQ(weights, expected) << shards;
    EXPECT_TRUE(run.ends().empty());
    run.expect_sound(plan);
  }
}

// Each shard has the layout of the learner that was first there; their orders need not agree.
TEST(ShardsOfARun, MayHaveMetTheTensorsInAnotherOrder) {
  ShardHarness run(short_run(), 2, 2);
  run.start_shard(0);
  run.start_learner(0);
  run.run_until(10.0);
  EXPECT_EQ(run.learner(0).stats().state, "joining");
  run.kill_learner(0);
  run.start_shard(1);
  run.start_learner(1);
  run.run_until(11.0);
  run.start_learner(0);
  run.run_until(60.0);
  EXPECT_NE(run.shard(0).layout(), run.shard(1).layout());
  for (std::size_t i = 0; i < run.learners(); ++i) {
    EXPECT_EQ(run.learner(i).stats().state, "training");
    for (FragmentId p = 0; p < 6; ++p) EXPECT_GT(run.merged_since(20.0, p, "learner-" + std::to_string(i)), 3u);
  }
  EXPECT_TRUE(run.ends().empty());
}

// Epochs are a shard's own: what is said of other shards' fragments would be taken for this one's.
TEST(ShardsOfARun, HearOnlyOfTheirOwnFragments) {
  ShardHarness run(short_run(), 2, 2);
  run.start();
  run.run_until(30.0);
  const Plan plan = *run.learner(0).plan();
  std::size_t seen = 0;
  run.tamper = [&](bool, std::uint32_t s, Header& header, std::string& body) {
    const auto bytes = std::as_bytes(std::span(body));
    std::string why;
    std::vector<Version> versions;
    std::vector<std::uint64_t> merged_to;
    if (header.type == MessageType::kHello) {
      const auto hello = decode_hello(bytes, &why);
      versions = hello->adopted, merged_to = hello->merged_to;
    } else if (header.type == MessageType::kWelcome) {
      const auto welcome = decode_welcome(bytes, &why);
      versions = welcome->versions, merged_to = welcome->merged_to;
    } else {
      return;
    }
    ++seen;
    for (FragmentId p = 0; p < plan.size(); ++p) {
      EXPECT_EQ(versions.at(p).none(), plan.fragments[p].shard != s) << message_name(header.type) << " " << p;
      EXPECT_EQ(merged_to.at(p) == 0, plan.fragments[p].shard != s) << message_name(header.type) << " " << p;
    }
  };
  for (std::uint32_t s = 0; s < 2; ++s) run.feed_learner(0, ChannelDown{Channel::kControl, "reset", s});
  run.run_until(40.0);
  EXPECT_EQ(seen, 4u);
  EXPECT_EQ(run.learner(0).stats().reconnects, 2u);
}

TEST(ShardsOfARun, AreAllToldGoodbye) {
  ShardHarness run(short_run(), 2, 2);
  run.start();
  run.run_until(30.0);
  run.feed_learner(0, CloseEvent{5.0});
  run.run_until(32.0);
  EXPECT_TRUE(run.closed(0));
  EXPECT_EQ(run.learner(0).stats().state, "closed");
  for (std::uint32_t s = 0; s < run.shards(); ++s) {
    EXPECT_EQ(run.status(s)["learners"][0]["state"] == "gone", run.status(s)["learners"][0]["id"] == "learner-0");
    EXPECT_EQ(run.lines_with("shard " + std::to_string(s) + ": learner 'learner-0' left: said goodbye"), 1u);
  }
}

}  // namespace
}  // namespace diloco::test
