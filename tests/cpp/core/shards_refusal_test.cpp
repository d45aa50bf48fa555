// Shards that do not belong together, and frames that come to the wrong one: refused in words.
#include "core/shard_harness.h"
#include "diloco/base/errors.h"

namespace diloco::test {
namespace {

struct ShardRefusal : ::testing::Test {
  ShardHarness run{short_run(), 2, 1};
  // The one end of the one learner.
  std::string end() {
    run.start();
    run.run_until(10.0);
    EXPECT_EQ(run.ends().size(), 1u);
    EXPECT_EQ(run.learner(0).stats().state, "rejected");
    return run.ends().empty() ? "" : run.ends()[0];
  }
  void expect_end(const std::string& text) {
    const std::string said = end();
    EXPECT_NE(said.find(text), std::string::npos) << said;
  }
};

TEST_F(ShardRefusal, OtherSettings) {
  run.change_shard = [](std::uint32_t s, SyncerCoreOptions& options) { options.settings.sync_every += s; };
  expect_end("syncer shards 0 and 1 have different settings: sync_every = 6 and 7");
}

TEST_F(ShardRefusal, OtherPlans) {
  run.change_shard = [](std::uint32_t s, SyncerCoreOptions& options) { options.settings.num_fragments -= s; };
  expect_end("syncer shards 0 and 1 have different plans (num_fragments, fragmenter or number of shards): 6 fragments and 5");
}

TEST_F(ShardRefusal, AnotherNumberOfShards) {
  run.change_shard = [](std::uint32_t, SyncerCoreOptions& options) { options.shards = 3; };
  expect_end("of syncer shard 2; 2 shard(s) are known here");
}

TEST_F(ShardRefusal, FewerShards) {
  run.change_shard = [](std::uint32_t, SyncerCoreOptions& options) { options.shards = 1, options.shard = 0; };
  expect_end("syncer shard 1 of the 2 known here has no fragment");
}

TEST_F(ShardRefusal, ShardsInTheWrongOrder) {
  run.change_shard = [](std::uint32_t s, SyncerCoreOptions& options) { options.shard = 1 - s; };
  expect_end("this is syncer shard 1 of 2, the learner takes it for shard 0");
}

TEST_F(ShardRefusal, MoreShardsThanFragments) {
  run.settings.num_fragments = 1;
  expect_end("shards: expected 1 to 1, the number of fragments");
}

TEST_F(ShardRefusal, AShardThatComesBackWithOtherSettingsThanThoseThatStayed) {
  run.start();
  run.run_until(20.0);
  run.kill_shard(1);
  run.settings.grace_gamma = 0.5;
  run.start_shard(1);
  run.run_until(30.0);
  ASSERT_EQ(run.ends().size(), 1u);
  EXPECT_NE(run.ends()[0].find("syncer shards 0 and 1 have different settings: grace_gamma"), std::string::npos)
      << run.ends()[0];
}

TEST_F(ShardRefusal, NotWhenAllComeBackWithThem) {
  run.start();
  run.run_until(20.0);
  run.kill_shard(0);
  run.kill_shard(1);
  run.run_until(25.0);
  run.settings.grace_gamma = 0.5;
  run.start_shard(0);
  run.start_shard(1);
  run.run_until(40.0);
  EXPECT_TRUE(run.ends().empty()) << run.ends()[0];
  EXPECT_EQ(run.learner(0).stats().state, "training");
  EXPECT_EQ(run.learner(0).settings().grace_gamma, 0.5);
}

TEST_F(ShardRefusal, AShardThatComesBackWithAnotherPlan) {
  run.start();
  run.run_until(20.0);
  run.kill_shard(1);
  run.settings.num_fragments = 4;
  run.start_shard(1);
  run.run_until(30.0);
  ASSERT_EQ(run.ends().size(), 1u);
  EXPECT_NE(run.ends()[0].find("the shard 1 of the syncer at harness came back with another plan (num_fragments or "
                               "fragmenter changed): 6 fragments and 4"), std::string::npos) << run.ends()[0];
}

struct MisdirectedUp : ShardRefusal, ::testing::WithParamInterface<MessageType> {};

TEST_P(MisdirectedUp, IsRefusedAndTheLearnerLeavesAllShards) {
  run.tamper = [&](bool to_syncer, std::uint32_t s, Header& header, std::string&) {
    if (to_syncer && s == 0 && header.type == GetParam()) header.shard = 1;
  };
  expect_end(std::string(message_name(GetParam())) + " for syncer shard 1; this is shard 0 of 2");
  EXPECT_EQ(run.learner(0).stats().shards_away, (std::vector<std::uint32_t>{0, 1}));
  EXPECT_EQ(run.status(1)["learners"][0]["state"], "gone");
}

INSTANTIATE_TEST_SUITE_P(Frames, MisdirectedUp,
                         ::testing::Values(MessageType::kLane, MessageType::kStep, MessageType::kChunk),
                         [](const auto& info) { return std::string(message_name(info.param)); });

TEST_F(ShardRefusal, AContributionToAnotherShardsFragment) {
  run.start();
  run.run_until(10.0);
  const Plan plan = *run.learner(0).plan();
  run.tamper = [&](bool to_syncer, std::uint32_t s, Header& header, std::string& body) {
    if (!to_syncer || s != 0 || header.type != MessageType::kBegin) return;
    std::string why;
    auto begin = *decode_begin(std::as_bytes(std::span(body)), &why);
    while (plan.fragments[begin.fragment].shard == 0) begin.fragment = (begin.fragment + 1) % plan.size();
    body = encode(begin);
  };
  run.run_until(20.0);
  ASSERT_EQ(run.ends().size(), 1u);
  EXPECT_NE(run.ends()[0].find("of syncer shard 1; this is shard 0"), std::string::npos) << run.ends()[0];
}

// A syncer's frame that cannot be costs the connection; the learner comes back.
TEST_F(ShardRefusal, AFrameOfAnotherShardEndsTheSession) {
  int left = 1;
  run.tamper = [&](bool to_syncer, std::uint32_t s, Header& header, std::string&) {
    if (!to_syncer && s == 0 && header.type == MessageType::kPull && left-- > 0) header.shard = 1;
  };
  run.start();
  run.run_until(40.0);
  EXPECT_EQ(run.lines_with("the shard 0 of the syncer at harness sent a bad PULL: it is of shard 1, this is the "
                           "connection to shard 0"), 1u);
  EXPECT_TRUE(run.ends().empty());
  EXPECT_EQ(run.learner(0).stats().state, "training");
  for (FragmentId p = 0; p < 6; ++p) EXPECT_GT(run.merged_since(10.0, p), 2u);
}

TEST_F(ShardRefusal, APullOfAnotherShardsFragmentEndsTheSession) {
  run.start();
  run.run_until(10.0);
  const Plan plan = *run.learner(0).plan();
  int left = 1;
  run.tamper = [&](bool to_syncer, std::uint32_t s, Header& header, std::string& body) {
    if (to_syncer || s != 0 || header.type != MessageType::kPull || left-- <= 0) return;
    std::string why;
    Pull pull = *decode_pull(std::as_bytes(std::span(body)), &why);
    while (plan.fragments[pull.fragment].shard == 0) pull.fragment = (pull.fragment + 1) % plan.size();
    body = encode(pull);
  };
  run.run_until(40.0);
  EXPECT_EQ(run.lines_with("is not one of this shard's"), 1u);
  EXPECT_EQ(run.learner(0).stats().reconnects, 1u);
  EXPECT_EQ(run.learner(0).stats().state, "training");
}

TEST(ShardOptions, NameAShardThatThereIs) {
  SyncerCoreOptions syncer;
  syncer.shard = syncer.shards = 2;
  EXPECT_THROW(SyncerCore{syncer}, ConfigError);
  LearnerCoreOptions learner;
  learner.layout.tensors.push_back({"a", {2}, Dtype::kF32, {}});
  learner.shards = 0;
  EXPECT_THROW(LearnerCore{learner}, ConfigError);
}

}  // namespace
}  // namespace diloco::test
