// Beginning, end, and losing the syncer in between.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "diloco/base/errors.h"
#include "learner/net_test.h"
#include "scratch_dir.h"

namespace diloco {
namespace {

using namespace testing;

using Lifecycle = NetTest;
DILOCO_OVER_BOTH_NETS(Lifecycle);

std::uint64_t epoch_of(Syncer& syncer) { return nlohmann::json::parse(syncer.status_json())["epoch"]; }

// F063: a new syncer on the same port. Learners train on meanwhile, come back by themselves, and bring the weights.
TEST_P(Lifecycle, SyncerLostAndReplacedOnTheSamePort) {
  SyncerOptions options;
  options.settings = small_settings();
  auto syncer = net.syncer(options);
  const std::string endpoint = syncer->endpoint();
  Bowl bowl(3.0f);
  const auto learner = net.learner(endpoint, named("survivor"), bowl.store);
  ASSERT_TRUE(learner->join(20));
  ASSERT_TRUE(train_until(*learner, bowl, 0.05f, [&] { return learner->stats().contributions_merged >= 4; }));
  const std::uint64_t before = epoch_of(*syncer);
  syncer.reset();
  ASSERT_TRUE(train_until(*learner, bowl, 0.001f, [&] { return learner->stats().state == "away"; }));
  const auto steps = learner->stats().steps;
  ASSERT_TRUE(train_until(*learner, bowl, 0.001f, [&] { return learner->stats().steps > steps + 20; }));

  options.bind = endpoint;
  syncer = net.syncer(options);
  const auto merged = learner->stats().contributions_merged;
  ASSERT_TRUE(train_until(*learner, bowl, 0.05f, [&] { return learner->stats().contributions_merged >= merged + 4; }))
      << learner->stats().state;
  EXPECT_GT(epoch_of(*syncer), before);
  EXPECT_GT(learner->stats().reconnects, 0u);
  learner->close(5);
}

// The syncer hears of every polite end as one: the bulk connection does not end before the goodbye is read.
TEST_P(Lifecycle, APoliteEndIsAlwaysAGoodbye) {
  const ScratchDir dir;
  SyncerOptions options;
  options.settings = small_settings();
  options.event_log = dir.path() + "/events.jsonl";
  const auto syncer = net.syncer(options);
  constexpr int kTimes = 60;
  for (int i = 0; i < kTimes; ++i) {
    Bowl bowl(1.0f);
    const auto learner = net.learner(syncer->endpoint(), named("guest"), bowl.store);
    ASSERT_TRUE(learner->join(20));
    bowl.step(0.1f);
    learner->boundary({1});
    learner->close(5);
  }
  syncer->stop(0);
  int goodbyes = 0, leaves = 0;
  std::ifstream in(options.event_log);
  for (std::string line; std::getline(in, line);) {
    const auto event = nlohmann::json::parse(line);
    if (event["event"] != "leave") continue;
    ++leaves;
    goodbyes += event["why"] == "said goodbye";
  }
  EXPECT_EQ(leaves, kTimes);
  EXPECT_EQ(goodbyes, kTimes);
}

// A newcomer has nothing of the run yet: with blending too, its first weights are the run's and not half its own.
TEST_P(Lifecycle, ANewcomersFirstWeightsAreTheRunsWhateverTheAdoption) {
  for (const Adopt adopt : {Adopt::kRebase, Adopt::kOverwrite, Adopt::kBlend}) {
    SyncerOptions options;
    options.settings = small_settings();
    options.settings.adopt = adopt;
    const auto syncer = net.syncer(options);
    Bowl first(1.0f, bowl_shapes(), 4.0f), second(1.0f, bowl_shapes(), -7.0f);
    const auto one = net.learner(syncer->endpoint(), named("one"), first.store);
    ASSERT_TRUE(one->join(20));
    const auto other = net.learner(syncer->endpoint(), named("other"), second.store);
    ASSERT_TRUE(other->join(20));
    EXPECT_LT(second.distance_to(4.0f), 1e-6) << static_cast<int>(adopt);
  }
}

// F049: leaving is bounded whether the syncer never was, or went away.
TEST_P(Lifecycle, CloseIsBoundedWithoutASyncer) {
  Bowl bowl(1.0f);
  LearnerOptions options = named("alone");
  options.linger_s = 0.5;
  const auto learner = net.learner("127.0.0.1:9", options, bowl.store);
  EXPECT_FALSE(learner->join(20)) << "an unreachable syncer ends the wait";
  for (int i = 0; i < 50; ++i) {
    bowl.step(0.1f);
    learner->boundary({1});
  }
  EXPECT_EQ(learner->stats().steps, 50u);
  const TimePoint start = monotonic_now();
  learner->close(1.0);
  EXPECT_LT(monotonic_now() - start, 5.0);
  learner->close(1.0);
  EXPECT_TRUE(learner->closed());
  EXPECT_THROW(learner->boundary({1}), std::logic_error);
}

TEST_P(Lifecycle, CloseIsBoundedWhenTheSyncerIsGone) {
  SyncerOptions syncer_options;
  syncer_options.settings = small_settings();
  auto syncer = net.syncer(syncer_options);
  Bowl bowl(1.0f);
  LearnerOptions options = named("left-behind");
  options.linger_s = 0.5;
  const auto learner = net.learner(syncer->endpoint(), options, bowl.store);
  ASSERT_TRUE(learner->join(20));
  syncer.reset();
  for (int i = 0; i < 20; ++i) {
    bowl.step(0.1f);
    learner->boundary({1});
  }
  const TimePoint start = monotonic_now();
  learner->close(1.0);
  EXPECT_LT(monotonic_now() - start, 5.0);
}

TEST_P(Lifecycle, GivingUpIsAnErrorOfTheNextCall) {
  Bowl bowl(1.0f);
  LearnerOptions options = named("impatient");
  options.give_up_after_s = 0.3;
  options.linger_s = 0.1;
  const auto learner = net.learner("127.0.0.1:9", options, bowl.store);
  EXPECT_THROW(train_until(*learner, bowl, 0.1f, [] { return false; }), TransportError);
  EXPECT_THROW(learner->boundary({1}), TransportError);
  learner->close(0.1);
}

// F052: a forked child cannot use the learner, and its end does not disturb the parent's.
TEST_P(Lifecycle, ForkedChildIsRefusedAndParentGoesOn) {
  SyncerOptions options;
  options.settings = small_settings();
  const auto syncer = net.syncer(options);
  Bowl bowl(1.0f);
  auto learner = net.learner(syncer->endpoint(), named("parent"), bowl.store);
  ASSERT_TRUE(learner->join(20));
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int status = 1;
    try {
      learner->boundary({1});
    } catch (const std::logic_error& error) {
      const std::string text = error.what();
      status = text.find(std::to_string(::getppid())) != std::string::npos ? 0 : 2;
    }
    learner->close(1.0);
    learner.reset();
    ::_exit(status);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  const auto merged = learner->stats().contributions_merged;
  EXPECT_TRUE(train_until(*learner, bowl, 0.1f, [&] { return learner->stats().contributions_merged > merged + 2; }));
}

TEST_P(Lifecycle, LogsComeOnTheCallingThreadOnly) {
  SyncerOptions syncer_options;
  syncer_options.settings = small_settings();
  auto syncer = net.syncer(syncer_options);
  Bowl bowl(1.0f);
  LearnerOptions options = named("talker");
  const auto mine = std::this_thread::get_id();
  int lines = 0, elsewhere = 0;
  options.log = [&](LogLevel, const std::string&) { ++(std::this_thread::get_id() == mine ? lines : elsewhere); };
  const auto learner = net.learner(syncer->endpoint(), options, bowl.store);
  ASSERT_TRUE(learner->join(20));
  syncer.reset();
  EXPECT_TRUE(train_until(*learner, bowl, 0.1f, [&] { return lines > 0; })) << "the syncer is away and nobody was told";
  learner->close(0.5);
  EXPECT_EQ(elsewhere, 0);
}

TEST_P(Lifecycle, DescribesItself) {
  SyncerOptions options;
  options.settings = small_settings();
  const auto syncer = net.syncer(options);
  Bowl bowl(1.0f);
  const auto learner = net.learner(syncer->endpoint(), named("told"), bowl.store);
  ASSERT_TRUE(learner->join(20));
  const std::string text = learner->describe();
  EXPECT_NE(text.find("'told'"), std::string::npos) << text;
  EXPECT_NE(text.find("MiB"), std::string::npos) << text;
}

TEST_P(Lifecycle, LearnersAndSyncerDestroyedInEitherOrder) {
  for (const bool syncer_first : {true, false}) {
    SyncerOptions options;
    options.settings = small_settings();
    auto syncer = net.syncer(options);
    Bowl bowl(1.0f);
    auto learner = net.learner(syncer->endpoint(), named("short"), bowl.store);
    learner->join(20);
    for (int i = 0; i < 10; ++i) learner->boundary({1});
    if (syncer_first) syncer.reset();
    learner.reset();
    syncer.reset();
  }
}

}  // namespace
}  // namespace diloco
