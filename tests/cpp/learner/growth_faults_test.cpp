// Growth where learners do not do the same at the same time.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "learner/growth_test.h"

namespace diloco {
namespace {

using namespace testing;

using GrowthFaults = GrowthTest;
DILOCO_OVER_BOTH_NETS(GrowthFaults);

// Whoever has added the same is found, in whatever order and however it was grouped.
TEST_P(GrowthFaults, WhatIsAddedInAnotherOrderIsTheSame) {
  start();
  join("a"), join("b"), join("c"), join("d");
  ASSERT_TRUE(train([&] { return merged(ones[0], 2, 2); }));
  add(ones[2], kTail);
  add(ones[0], kHead), add(ones[1], kHead);
  ASSERT_TRUE(train([&] { return merged(ones[0], 2, 3) && merged(ones[1], 2, 3); })) << said();
  add(ones[2], kHead);
  std::vector<NamedShape> both = kHead;
  both.push_back(kTail.front());
  add(ones[3], both);
  ASSERT_TRUE(train([&] {
    return merged(ones[0], 4, 3) && merged(ones[1], 4, 3) && merged(ones[2], 4, 4) && merged(ones[3], 4, 4);
  })) << said();
  for (One& one : ones) add_up(one);
}

TEST_P(GrowthFaults, InLockstepTheOthersAddLater) {
  start(Mode::kLockstep, 3);
  join("a"), join("b"), join("c");
  std::atomic<int> made[3];
  const auto late = [end = monotonic_now() + 30] { return monotonic_now() > end; };
  std::thread b([&] { run(ones[1], 50, 200, &made[1], late); }), c([&] { run(ones[2], 80, 200, &made[2], late); });
  EXPECT_TRUE(run(ones[0], 50, 200, &made[0], late)) << said();
  b.join(), c.join();
  for (One& one : ones) EXPECT_TRUE(merged(one, 3, 3)) << said();
}

TEST_P(GrowthFaults, InLockstepOneOfThoseWhoHaveItLeaves) {
  start(Mode::kLockstep);
  join("a"), join("b"), join("c");
  std::atomic<int> made[3];
  std::atomic<bool> over = false;
  const auto late = [&, end = monotonic_now() + 30] { return over || monotonic_now() > end; };
  std::thread b([&] {
    run(ones[1], 50, 120, &made[1], late);
    ones[1].learner->close(2);
  });
  std::thread c([&] { run(ones[2], 0, 1 << 20, &made[2], late); });
  EXPECT_TRUE(run(ones[0], 50, 300, &made[0], late)) << said();
  over = true;
  b.join(), c.join();
}

// One place for a round: it is not kept by one that waits for a learner which makes no steps.
TEST_P(GrowthFaults, WhoHasItAndStopsKeepsNoRoundFromTheOthers) {
  start();
  options.settings.max_inflight = 1;
  syncer.reset();
  syncer = net.syncer(options);
  join("a"), join("b"), join("c");
  add(ones[0], kHead), add(ones[1], kHead);
  ASSERT_TRUE(train([&] { return merged(ones[0], 3, 3) && merged(ones[1], 3, 3); })) << said();
  std::swap(ones[1], ones[2]);
  const One stopped = std::move(ones.back());
  ones.pop_back();
  const std::uint64_t at = ones[1].learner->stats().versions[0].n;
  EXPECT_TRUE(train([&] { return ones[1].learner->stats().versions[0].n > at + 20; })) << said();
}

TEST_P(GrowthFaults, AMemoryThatIsTooSmallForItIsSaidAndTheRunGoesOn) {
  start();
  options.settings.payload_memory_bytes = 340;
  syncer.reset();
  syncer = net.syncer(options);
  join("a"), join("b");
  add(ones[0], kHead), add(ones[1], kHead);
  ASSERT_TRUE(train([&] { return heard("the run cannot take 'head.bias', 'head.weight': it needs"); })) << said();
  const std::uint64_t at = ones[1].learner->stats().versions[0].n;
  EXPECT_TRUE(train([&] { return ones[1].learner->stats().versions[0].n > at + 5; })) << said();
  EXPECT_EQ(tensors(), 4u);
}

// The syncer comes back without state, and one comes first who does not have what was added.
TEST_P(GrowthFaults, ASyncerWithoutStateHasFewerFragmentsUntilTheyComeBack) {
  start();
  join("a"), join("b");
  ASSERT_TRUE(train([&] { return merged(ones[0], 1, 2); }));
  add(ones[0], kTail), add(ones[0], kHead);  // b adds them later, and the run has them in this order
  add(ones[1], kTail);
  ASSERT_TRUE(train([&] { return merged(ones[0], 2, 3) && merged(ones[1], 2, 3); })) << said();
  add(ones[1], kHead);
  ASSERT_TRUE(train([&] { return merged(ones[0], 2, 4) && merged(ones[1], 2, 4); })) << said();
  const auto before = ones[0].learner->stats();
  syncer.reset();
  ASSERT_TRUE(train([&] { return ones[0].learner->stats().state == "away" && ones[1].learner->stats().state == "away"; }));
  syncer = net.syncer(options);
  Bowl without(3.0f);
  const auto late = net.learner(syncer->endpoint(), named("late"), without.store);
  const auto on = [&](const One& one) { return one.learner->stats().epoch > before.epoch && merged(one, before.versions[3].n + 2, 4); };
  EXPECT_TRUE(train([&] { return on(ones[0]) && on(ones[1]); })) << said();
  for (One& one : ones) add_up(one);
}

}  // namespace
}  // namespace diloco
