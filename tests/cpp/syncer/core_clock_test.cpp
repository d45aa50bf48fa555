#include "diloco/base/core_clock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace diloco {
namespace {

void stall() { std::this_thread::sleep_for(std::chrono::milliseconds(60)); }  // what a starved process goes through

TEST(CoreClock, AStallCountsOnlyAsFarAsItWasAllowed) {
  CoreClock clock;
  const TimePoint start = clock.now();
  clock.waits(0.01, 0.01);
  stall();
  EXPECT_LE(clock.now(), start + 0.0201 + 0.01);
  const TimePoint stopped_at = clock.now();
  EXPECT_EQ(clock.now(), stopped_at) << "stands still at the limit";
  clock.works(0.01);
  EXPECT_GE(clock.now(), stopped_at);
  stall();
  EXPECT_LE(clock.now(), stopped_at + 0.0101);
}

TEST(CoreClock, FollowsTheMachineOtherwise) {
  CoreClock clock;
  clock.waits(30, 30);
  const TimePoint core = clock.now(), machine = monotonic_now();
  stall();
  EXPECT_GE(clock.now() - core, 0.059);
  EXPECT_LE(clock.now() - core, monotonic_now() - machine + 1e-3);
}

}  // namespace
}  // namespace diloco
