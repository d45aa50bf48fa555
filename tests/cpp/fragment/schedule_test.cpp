#include "diloco/fragment/schedule.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace diloco {
namespace {

struct Grid {
  std::uint32_t every, fragments;
};
const Grid kGrids[] = {{24, 24}, {24, 5}, {30, 7}, {100, 2}, {7, 24}, {1, 1}, {1, 24}, {2, 3}, {5, 1}, {24, 1}, {3, 3}};

TEST(Phase, SpreadsFragmentsOverOnePeriod) {
  for (const auto [every, fragments] : kGrids) {
    Clock before = 0;
    for (FragmentId p = 0; p < fragments; ++p) {
      const Clock at = phase(p, every, fragments);
      EXPECT_GE(at, 1u);
      EXPECT_LE(at, every);
      EXPECT_GE(at, before);
      EXPECT_EQ(first_due(p, every, fragments), at);
      before = at;
    }
    EXPECT_EQ(before, every);
  }
}

TEST(Phase, OnePerStepWithHEqualToP) {
  std::set<Clock> seen;
  for (FragmentId p = 0; p < 24; ++p) seen.insert(phase(p, 24, 24));
  EXPECT_EQ(seen.size(), 24u);
}

TEST(NextDue, OnePeriodLaterWhenARoundOpensOnTime) {
  for (const auto [every, fragments] : kGrids) {
    for (FragmentId p = 0; p < fragments; ++p) {
      Clock due = first_due(p, every, fragments);
      for (int k = 0; k < 5; ++k) {
        const Clock next = next_due(p, due, every, fragments);
        EXPECT_EQ(next, due + every);
        due = next;
      }
    }
  }
}

TEST(NextDue, OddPeriodsRoundHalfUp) {
  // H = 5, P = 1: due at 5; opened late at 7, half a period later is 9.5: 10 qualifies. At 8 it does not: 15.
  EXPECT_EQ(next_due(0, 7, 5, 1), 10u);
  EXPECT_EQ(next_due(0, 8, 5, 1), 15u);
}

TEST(NextDue, NoBurstAfterAnOutage) {
  // H = 24, P = 24: fragment 0 was due at 1; nothing opened until clock 1000.
  const Clock next = next_due(0, 1000, 24, 24);
  EXPECT_GE(next, 1012u);
  EXPECT_LT(next, 1012u + 24);
  EXPECT_EQ(next % 24, 1u);
}

// Rounds that open late by any amount: gaps of at least H/2, on average of at least H, phases kept.
TEST(NextDue, GapsWithRandomDelays) {
  std::mt19937_64 engine(1);
  for (const auto [every, fragments] : kGrids) {
    for (FragmentId p = 0; p < fragments; ++p) {
      const Clock first = first_due(p, every, fragments);
      Clock due = first;
      Clock opened = 0;
      constexpr Clock kRounds = 200;
      for (Clock k = 0; k < kRounds; ++k) {
        const Clock late = engine() % 10 == 0 ? engine() % (5 * every) : engine() % (every / 2 + 1);
        const Clock now = due + late;
        if (k > 0) {
          ASSERT_GE(2 * (now - opened), every) << every << " " << fragments;
        }
        opened = now;
        const Clock next = next_due(p, opened, every, fragments);
        ASSERT_GE(2 * (next - opened), every);
        ASSERT_LT(next - opened, (every + 1) / 2 + every);
        ASSERT_GE(next, due + every);
        ASSERT_EQ((next - first) % every, 0u);
        due = next;
      }
      EXPECT_GE(opened - first, (kRounds - 1) * every);
    }
  }
}

Settings lockstep(std::uint32_t every, std::uint32_t overlap, Offsets offsets) {
  Settings settings;
  settings.mode = Mode::kLockstep;
  settings.sync_every = every;
  settings.overlap_steps = overlap;
  settings.offsets = offsets;
  return settings;
}

// Streaming DiLoCo's example, H = 100 and P = 2: 100, 200, ... and 150, 250, ...
TEST(Lockstep, StreamingExample) {
  const Settings settings = lockstep(100, 5, Offsets::kStreaming);
  EXPECT_EQ(lockstep_adoption(0, 0, settings, 2), 100u);
  EXPECT_EQ(lockstep_adoption(0, 1, settings, 2), 200u);
  EXPECT_EQ(lockstep_adoption(1, 0, settings, 2), 150u);
  EXPECT_EQ(lockstep_adoption(1, 1, settings, 2), 250u);
  EXPECT_TRUE(lockstep_adopts_at(1, 150, settings, 2));
  EXPECT_FALSE(lockstep_adopts_at(1, 50, settings, 2));
  EXPECT_FALSE(lockstep_adopts_at(0, 150, settings, 2));
  EXPECT_TRUE(lockstep_stages_at(1, 145, settings, 2));
  EXPECT_FALSE(lockstep_stages_at(1, 45, settings, 2));
}

TEST(Lockstep, StaggeredExample) {
  const Settings settings = lockstep(100, 5, Offsets::kStaggered);
  EXPECT_EQ(lockstep_adoption(0, 0, settings, 2), 50u);
  EXPECT_EQ(lockstep_adoption(1, 0, settings, 2), 100u);
  EXPECT_EQ(lockstep_adoption(0, 3, settings, 2), 350u);
  EXPECT_EQ(lockstep_adoption(0, 0, lockstep(10, 0, Offsets::kStaggered), 3), 4u);  // ceil(10/3)
  EXPECT_EQ(lockstep_adoption(1, 0, lockstep(10, 0, Offsets::kStreaming), 3), 13u);  // 10 + floor(10/3)
}

TEST(Lockstep, ClassicDilocoIsOneFragmentWithoutOverlap) {
  for (const Offsets offsets : {Offsets::kStaggered, Offsets::kStreaming}) {
    const Settings settings = lockstep(6, 0, offsets);
    for (Clock t = 0; t < 60; ++t) {
      EXPECT_EQ(lockstep_adopts_at(0, t, settings, 1), t > 0 && t % 6 == 0) << t;
      EXPECT_EQ(lockstep_stages_at(0, t, settings, 1), t > 0 && t % 6 == 0) << t;
    }
  }
}

TEST(Lockstep, StagingsBeforeTheFirstStepAreSkippedWithTheirAdoptions) {
  // H = 4, P = 4, tau = 2: fragments 0 and 1 would be staged at -1 and 0.
  const Settings settings = lockstep(4, 2, Offsets::kStaggered);
  EXPECT_FALSE(lockstep_adopts_at(0, 1, settings, 4));
  EXPECT_FALSE(lockstep_adopts_at(1, 2, settings, 4));
  EXPECT_TRUE(lockstep_adopts_at(2, 3, settings, 4));
  EXPECT_TRUE(lockstep_stages_at(2, 1, settings, 4));
  EXPECT_FALSE(lockstep_stages_at(1, 0, settings, 4));
  EXPECT_EQ(lockstep_next_staging(0, 0, settings, 4), 3u);
  EXPECT_EQ(lockstep_next_staging(1, 0, settings, 4), 4u);
  EXPECT_EQ(lockstep_next_staging(2, 0, settings, 4), 1u);
}

TEST(Lockstep, StagingAndAdoptionBelongTogether) {
  for (const auto [every, fragments] : kGrids) {
    for (const std::uint32_t overlap : {0u, 1u, 2u, 5u, 60u}) {
      for (const Offsets offsets : {Offsets::kStaggered, Offsets::kStreaming}) {
        const Settings settings = lockstep(every, overlap, offsets);
        for (FragmentId p = 0; p < fragments; ++p) {
          Clock next = lockstep_next_staging(p, 0, settings, fragments);
          for (Clock t = 0; t < 4 * every; ++t) {
            const bool stages = lockstep_stages_at(p, t, settings, fragments);
            ASSERT_EQ(stages, lockstep_adopts_at(p, t + overlap, settings, fragments)) << every << " " << fragments << " " << t;
            ASSERT_EQ(stages, t == next);
            if (stages) next = lockstep_next_staging(p, t + 1, settings, fragments);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace diloco
