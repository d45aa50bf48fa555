#include "diloco/quorum/quorum.h"

#include <gtest/gtest.h>

#include "diloco/quorum/ema.h"

namespace diloco {
namespace {

TEST(QuorumClock, IsTheKthLargest) {
  const std::vector<LearnerPace> pace{{10, 1.0}, {30, 3.0}, {20, 2.0}};
  EXPECT_EQ(quorum_clock(pace, 1), 30u);
  EXPECT_EQ(quorum_clock(pace, 2), 20u);
  EXPECT_EQ(quorum_clock(pace, 3), 10u);
  EXPECT_EQ(quorum_clock(pace, 4), std::nullopt);
  EXPECT_EQ(quorum_clock({}, 1), std::nullopt);
}

TEST(QuorumStep, IsTheKthFastestOfTheKnown) {
  const std::vector<LearnerPace> pace{{10, 3.0}, {30, 1.0}, {20, 0.0}};
  EXPECT_DOUBLE_EQ(quorum_step_s(pace, 1), 1.0);
  EXPECT_DOUBLE_EQ(quorum_step_s(pace, 2), 3.0);
  EXPECT_DOUBLE_EQ(quorum_step_s(pace, 3), 0.0);
}

TEST(Grace, GoldenValueOfThePaper) {
  Settings settings;
  settings.overlap_steps = 2;
  settings.grace_gamma = 0.8;
  const GraceWindow window = grace_window(settings, 1.0, 0.3, 0.5);  // slack 1.2 s
  EXPECT_NEAR(window.seconds, 0.96, 1e-12);
  EXPECT_FALSE(window.capped);
}

TEST(Grace, IsNeverNegativeAndNeverAboveTheCap) {
  Settings settings;
  EXPECT_DOUBLE_EQ(grace_window(settings, 1.0, 5.0, 5.0).seconds, 0.0);
  settings.overlap_steps = 50;
  EXPECT_DOUBLE_EQ(grace_window(settings, 1.0, 0.0, 0.0).seconds, 1.0);  // default cap: one step
  EXPECT_TRUE(grace_window(settings, 1.0, 0.0, 0.0).capped);
  settings.grace_cap_s = 0.25;
  EXPECT_DOUBLE_EQ(grace_window(settings, 1.0, 0.0, 0.0).seconds, 0.25);
}

TEST(Grace, WithoutAnEstimateTheCapHolds) {
  Settings settings;
  EXPECT_DOUBLE_EQ(grace_window(settings, 0.0, 0.1, 0.1).seconds, 0.0);
  settings.grace_cap_s = 0.25;
  EXPECT_DOUBLE_EQ(grace_window(settings, 0.0, 0.1, 0.1).seconds, 0.25);
}

TEST(Grace, FixedAndNone) {
  Settings settings;
  settings.grace = Grace::kFixed;
  settings.grace_s = 0.7;
  EXPECT_DOUBLE_EQ(grace_window(settings, 1.0, 9.0, 9.0).seconds, 0.7);
  settings.grace = Grace::kNone;
  EXPECT_DOUBLE_EQ(grace_window(settings, 1.0, 0.0, 0.0).seconds, 0.0);
}

TEST(Decide, NeverBelowTheQuorum) {
  RoundView view{2, 1, 1, 0, 5.0, false};
  EXPECT_EQ(decide(view, Settings{}, 100.0).action, RoundAction::kWait);
}

TEST(Decide, ClosesEarlyWithTheReason) {
  const Settings settings;
  RoundView view{1, 2, 2, 0, 5.0, false};
  EXPECT_EQ(decide(view, settings, 1.0).reason, "all_present");
  view.waited_for = 1;
  EXPECT_EQ(decide(view, settings, 4.999).action, RoundAction::kWait);
  EXPECT_EQ(decide(view, settings, 5.0).reason, "grace_elapsed");
  view.capped = true;
  EXPECT_EQ(decide(view, settings, 5.0).reason, "cap");
}

TEST(Decide, WhatIsLeftOverMakesNoQuorumWhileAnswersAreUnderWay) {
  Settings settings;
  settings.grace = Grace::kNone;
  RoundView view{2, 3, 1, 2, 5.0, false};
  EXPECT_EQ(decide(view, settings, 100.0).action, RoundAction::kWait);
  view.fresh = 2;
  EXPECT_EQ(decide(view, settings, 100.0).reason, "no_grace");
  view.fresh = 0;
  view.waited_for = 0;
  EXPECT_EQ(decide(view, settings, 100.0).reason, "all_present");
}

TEST(Decide, LockstepWaitsForEverybody) {
  Settings settings;
  settings.mode = Mode::kLockstep;
  RoundView view{1, 2, 2, 1, 5.0, false};
  EXPECT_EQ(decide(view, settings, 1e6).action, RoundAction::kWait);
  view.waited_for = 0;
  EXPECT_EQ(decide(view, settings, 1.0).reason, "all_present");
}

TEST(Inflight, FollowsTheMeasuredRound) {
  Settings settings;  // H = 24
  EXPECT_EQ(inflight_limit(settings, 24, 0.0, 0.0), 2u);
  EXPECT_EQ(inflight_limit(settings, 24, 1.9, 1.0), 3u);
  EXPECT_EQ(inflight_limit(settings, 24, 500.0, 1.0), 24u);
  settings.max_inflight = 7;
  EXPECT_EQ(inflight_limit(settings, 24, 0.1, 1.0), 7u);
}

TEST(Stall, FiveStepsOrTwoSeconds) {
  EXPECT_DOUBLE_EQ(stall_after_s(0.1), 2.0);
  EXPECT_DOUBLE_EQ(stall_after_s(3.0), 15.0);
}

TEST(EmaTest, FirstValueThenSmooth) {
  Ema ema(0.5);
  EXPECT_FALSE(ema.has_value());
  EXPECT_DOUBLE_EQ(ema.value_or(9.0), 9.0);
  ema.add(2.0);
  EXPECT_DOUBLE_EQ(ema.value_or(9.0), 2.0);
  ema.add(4.0);
  EXPECT_DOUBLE_EQ(ema.value_or(9.0), 3.0);
}

}  // namespace
}  // namespace diloco
