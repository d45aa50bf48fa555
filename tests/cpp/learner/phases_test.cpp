// The phases of the training thread: told to an observer one at a time, and added up.
#include "diloco/learner/phases.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "learner/net_test.h"

namespace diloco {
namespace {

using namespace testing;

using Phases = NetTest;
DILOCO_OVER_BOTH_NETS(Phases);

struct Recorder : PhaseObserver {
  void begin(const char* name) override {
    EXPECT_EQ(open, 0);
    ++open;
    names.emplace_back(name);
    began = monotonic_now();
  }
  void end() override {
    --open;
    EXPECT_EQ(open, 0);
    if (names.back() == "diloco::hold") held_s += monotonic_now() - began;
  }
  int open = 0;
  TimePoint began = 0;
  Seconds held_s = 0;
  std::vector<std::string> names;
};

TEST_P(Phases, AreToldOneAtATimeAndAddedUp) {
  SyncerOptions syncer_options;
  syncer_options.settings = small_settings();
  Settings& settings = syncer_options.settings;
  settings.mode = Mode::kLockstep;
  settings.num_fragments = 1;
  settings.sync_every = 2;
  settings.overlap_steps = 0;
  settings.min_quorum = 1;
  settings.adopt = Adopt::kOverwrite;
  const auto syncer = net.syncer(syncer_options);
  Bowl bowl(1.0f);
  auto recorder = std::make_shared<Recorder>();
  LearnerOptions options = named("alone");
  options.phases = recorder;
  const auto learner = net.learner(syncer->endpoint(), options, bowl.store);
  ASSERT_TRUE(learner->join(20));
  recorder->names.clear();
  for (int step = 0; step < 4; ++step) {
    bowl.step(0.1f);
    learner->boundary({1});
  }
  std::vector<std::string> without_repeats;
  for (const std::string& name : recorder->names) {
    if (without_repeats.empty() || without_repeats.back() != name) without_repeats.push_back(name);
  }
  const std::vector<std::string> round = {"diloco::stage", "diloco::hold", "diloco::adopt"};
  std::vector<std::string> expected = round;
  expected.insert(expected.end(), round.begin(), round.end());
  EXPECT_EQ(without_repeats, expected);
  EXPECT_EQ(recorder->open, 0);
  const PhaseSeconds seconds = learner->phase_seconds();
  EXPECT_GT(seconds.stage_s, 0);
  EXPECT_GT(seconds.adopt_s, 0);
  EXPECT_GE(seconds.hold_s, recorder->held_s);
}

TEST_P(Phases, NoneIsEnteredWithoutWork) {
  SyncerOptions syncer_options;
  syncer_options.settings = small_settings();
  const auto syncer = net.syncer(syncer_options);
  Bowl bowl(1.0f);
  auto recorder = std::make_shared<Recorder>();
  LearnerOptions options = named("alone");
  options.phases = recorder;
  const auto learner = net.learner(syncer->endpoint(), options, bowl.store);
  ASSERT_TRUE(learner->join(20));
  recorder->names.clear();
  learner->boundary({0});  // no token: nothing to stage, nothing new to adopt
  EXPECT_TRUE(recorder->names.empty());
}

}  // namespace
}  // namespace diloco
