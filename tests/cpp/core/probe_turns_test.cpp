#include "diloco/core/probe_turns.h"

#include <gtest/gtest.h>

#include <random>

#include "diloco/wire/header.h"

namespace diloco {
namespace {

using Answer = ProbeTurns::Answer;

TEST(ProbeTurns, OnePeerMeasuresAtATime) {
  ProbeTurns turns;
  Seconds again_s = 0.0;
  EXPECT_EQ(turns.ask(1, 1000, 10.0, &again_s), Answer::kGranted);
  EXPECT_EQ(turns.ask(2, 1000, 11.0, &again_s), Answer::kOtherPeer);
  EXPECT_DOUBLE_EQ(again_s, kProbeAskAgainS);
  EXPECT_EQ(turns.ask(2, 1000, 9.9 + kProbeIdleS, &again_s), Answer::kOtherPeer);
  EXPECT_NEAR(again_s, 0.1, 1e-9);
  EXPECT_EQ(turns.ask(2, 1000, 10.0 + kProbeIdleS, &again_s), Answer::kGranted);  // the first asks no more
  EXPECT_EQ(turns.ask(1, 1000, 10.0 + kProbeIdleS, &again_s), Answer::kOtherPeer);
  turns.gone(1);  // not whose turn it is
  EXPECT_EQ(turns.ask(1, 1000, 10.0 + kProbeIdleS, &again_s), Answer::kOtherPeer);
  turns.gone(2);
  EXPECT_EQ(turns.ask(1, 1000, 10.0 + kProbeIdleS, &again_s), Answer::kGranted);
}

// Somebody who never stops asking leaves a pause in which those who do as they are told come in.
TEST(ProbeTurns, ATurnEndsAndOthersComeIn) {
  ProbeTurns turns;
  Seconds again_s = 0.0;
  TimePoint others_at = 0.0, other_came = 0.0;
  for (TimePoint now = 0.0; now < 60.0 && other_came == 0.0; now += 0.05) {
    const Answer greedy = turns.ask(1, 0, now, &again_s);
    EXPECT_EQ(greedy == Answer::kGranted, now < kProbeTurnS || now >= kProbeTurnS + kProbeIdleS) << now;
    if (now < others_at) continue;
    if (turns.ask(2, 0, now, &again_s) == Answer::kGranted) other_came = now;
    others_at = now + again_s;
  }
  EXPECT_GE(other_came, kProbeTurnS);
  EXPECT_LT(other_came, kProbeTurnS + kProbeIdleS);
}

TEST(ProbeTurns, AllTogetherMoveNoMoreThanTheBudget) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 20; ++round) {
    ProbeTurns turns;
    double moved = 0.0;
    TimePoint now = 0.0;
    for (int i = 0; i < 20000; ++i) {
      now += static_cast<double>(random() % 1000) * 1e-5;
      const std::uint64_t bytes = random() % (2 * kProbeFrameBytes);
      Seconds again_s = 0.0;
      const PeerId peer = 1 + random() % 3;
      if (turns.ask(peer, bytes, now, &again_s) == Answer::kGranted) moved += static_cast<double>(bytes);
      else EXPECT_GT(again_s, 0.0);
      if (random() % 50 == 0) turns.gone(1 + random() % 3);  // who reconnects gains nothing
      ASSERT_LE(moved, static_cast<double>(kProbeBurstBytes) + now * static_cast<double>(kProbeBytesPerS) + 1.0);
    }
    EXPECT_GT(moved, static_cast<double>(kProbeBurstBytes));
  }
}

TEST(ProbeTurns, WhatIsOwedIsWaitedFor) {
  ProbeTurns turns;
  Seconds again_s = 0.0;
  ASSERT_EQ(turns.ask(1, 0, 0.0, &again_s), Answer::kGranted);
  turns.owe(kProbeBurstBytes + kProbeBytesPerS);
  ASSERT_EQ(turns.ask(1, 1, 0.0, &again_s), Answer::kBudget);
  EXPECT_NEAR(again_s, 1.0, 1e-6);
  EXPECT_EQ(turns.ask(1, 1, again_s + 1e-3, &again_s), Answer::kGranted);
}

// Never refused for ever: whatever is asked for at once is there in the end.
TEST(ProbeTurns, TheLargestRequestIsGrantedOnceTheBudgetIsFull) {
  ProbeTurns turns;
  Seconds again_s = 0.0;
  ASSERT_EQ(turns.ask(1, ~std::uint64_t{0}, 0.0, &again_s), Answer::kGranted);
  EXPECT_EQ(turns.ask(1, 1, 1.0, &again_s), Answer::kBudget);
}

}  // namespace
}  // namespace diloco
