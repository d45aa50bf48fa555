// F014: tensors that learners add to the model while they train.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "learner/growth_test.h"

namespace diloco {
namespace {

using namespace testing;

using Growth = GrowthTest;
DILOCO_OVER_BOTH_NETS(Growth);

TEST_P(Growth, WhatTwoAddIsSynchronised) {
  start();
  join("a"), join("b");
  ASSERT_TRUE(train([&] { return merged(ones[0], 2, 2); }));
  add(ones[0], kHead, 1.5f);
  ASSERT_TRUE(train([&] { return heard("'a' has added 'head.bias', 'head.weight', which the run does not have"); }));
  const std::uint64_t at = ones[0].learner->stats().versions[0].n;
  ASSERT_TRUE(train([&] { return ones[0].learner->stats().versions[0].n >= at + 2; })) << "the others go on";
  EXPECT_EQ(tensors(), 4u);
  add(ones[1], kHead, 1.5f);
  const auto all = [&] { return merged(ones[0], 3, 3) && merged(ones[1], 3, 3); };
  ASSERT_TRUE(train(all)) << said();
  EXPECT_EQ(tensors(), 6u);
  EXPECT_TRUE(heard("the run has grown by 'head.bias', 'head.weight'"));
  for (One& one : ones) add_up(one);
  // Their targets are 1 and 2: what is merged lies between, on both the same.
  ASSERT_TRUE(wait_until([&] {
    const auto weights = syncer->weights();
    return weights.size() == 6 && weights[4][0] > 1.0f && weights[4][0] < 2.0f;
  }));
  std::vector<float> one(15), other(15);
  ASSERT_TRUE(train([&] {
    ones[0].learner->read_anchor(4, one.data());
    ones[1].learner->read_anchor(4, other.data());
    return one == other;
  }));
}

TEST_P(Growth, WhatOneAddsIsRefusedByNameAndTheOthersGoOn) {
  start();
  join("a"), join("b");
  ASSERT_TRUE(train([&] { return merged(ones[0], 2, 2); }));
  add(ones[0], kHead);
  ASSERT_TRUE(train([&] { return heard("'a' has added 'head.bias', 'head.weight', which the run does not have: trained by this "
                                       "learner alone until another one adds the same"); }));
  const std::uint64_t at = ones[0].learner->stats().versions[1].n;
  ASSERT_TRUE(train([&] { return ones[0].learner->stats().versions[1].n >= at + 3 && merged(ones[1], at + 3, 2); }));
  EXPECT_EQ(tensors(), 4u);
  EXPECT_NE(ones[0].bowl.store->values[4][0], 0.0f) << "trained alone";
  // Another shape is not the same.
  add(ones[1], {{"head.weight", {4, 3}}, {"head.bias", {5}}});
  ASSERT_TRUE(train([&] { return heard("'b' has added 'head.bias', 'head.weight', which the run does not have"); }));
  ASSERT_TRUE(train([&] { return merged(ones[0], at + 6, 2) && merged(ones[1], at + 6, 2); }));
  EXPECT_EQ(tensors(), 4u);
}

TEST_P(Growth, TheOnlyLearnerNeedsNobody) {
  start(Mode::kDecoupled, 1);
  join("a");
  ASSERT_TRUE(train([&] { return merged(ones[0], 2, 2); }));
  add(ones[0], kHead);
  ASSERT_TRUE(train([&] { return merged(ones[0], 2, 3); })) << said();
  add(ones[0], {{"tail", {3}}});
  ASSERT_TRUE(train([&] { return merged(ones[0], 2, 4); })) << said();
  add_up(ones[0]);
}

TEST_P(Growth, WhoDoesNotHaveItTakesPartInTheRestAndAddsItLater) {
  start();
  join("a"), join("b");
  add(ones[0], kHead), add(ones[1], kHead);
  ASSERT_TRUE(train([&] { return merged(ones[0], 2, 3) && merged(ones[1], 2, 3); })) << said();
  join("late");
  EXPECT_TRUE(heard("learner 'late' does not have 'head.bias', 'head.weight'"));
  const auto before = ones[2].learner->stats().contributions_merged;
  ASSERT_TRUE(train([&] { return ones[2].learner->stats().contributions_merged >= before + 4; }));
  EXPECT_EQ(ones[2].learner->stats().versions.size(), 2u);
  add(ones[2], kHead, 9.0f);
  ASSERT_TRUE(train([&] { return ones[2].learner->stats().versions.size() == 3; })) << said();
  const std::uint64_t at = ones[2].learner->stats().versions[2].n;
  ASSERT_TRUE(train([&] { return merged(ones[2], at + 3, 3); }));
  add_up(ones[2]);
  EXPECT_EQ(tensors(), 6u);
}

TEST_P(Growth, InItsNextLifeItHasEverythingFromTheStart) {
  start();
  join("a"), join("b");
  add(ones[0], kHead), add(ones[1], kHead);
  ASSERT_TRUE(train([&] { return merged(ones[0], 2, 3) && merged(ones[1], 2, 3); })) << said();
  ones[1].learner->close(2);
  ones.pop_back();
  std::vector<NamedShape> shapes = bowl_shapes();
  shapes.insert(shapes.begin(), kHead.begin(), kHead.end());
  One& again = join("b", shapes);
  const std::uint64_t at = again.learner->stats().versions[2].n;
  EXPECT_GE(at, 2u);
  ASSERT_TRUE(train([&] { return merged(ones[0], at + 3, 3) && merged(ones[1], at + 3, 3); }));
  // One that has yet more from the start is another model.
  shapes.push_back({"stray", {2}});
  Bowl other(1.0f, shapes);
  const auto stray = net.learner(syncer->endpoint(), named("stray"), other.store);
  EXPECT_THROW(stray->join(20), ConfigError);
}

TEST_P(Growth, ASyncerWithoutStateGrowsAgain) {
  start();
  join("a"), join("b");
  add(ones[0], kHead), add(ones[1], kHead);
  ASSERT_TRUE(train([&] { return merged(ones[0], 3, 3) && merged(ones[1], 3, 3); })) << said();
  const auto before = ones[0].learner->stats();
  syncer.reset();
  ASSERT_TRUE(train([&] { return ones[0].learner->stats().state == "away"; }));
  syncer = net.syncer(options);
  const auto on = [&](const One& one) {
    const auto stats = one.learner->stats();
    return stats.epoch > before.epoch && merged(one, before.versions[2].n + 2, 3);
  };
  ASSERT_TRUE(train([&] { return on(ones[0]) && on(ones[1]); })) << said();
  EXPECT_EQ(tensors(), 6u);
  for (One& one : ones) add_up(one);
}

TEST_P(Growth, InLockstepToo) {
  start(Mode::kLockstep);
  join("a"), join("b");
  std::atomic<int> made[2];
  const auto late = [end = monotonic_now() + 30] { return monotonic_now() > end; };
  std::thread other([&] { run(ones[1], 50, 160, &made[1], late); });
  EXPECT_TRUE(run(ones[0], 50, 160, &made[0], late)) << said();
  other.join();
  EXPECT_EQ(tensors(), 6u);
  for (One& one : ones) {
    EXPECT_TRUE(merged(one, 3, 3)) << said();
    add_up(one);
  }
  EXPECT_EQ(ones[0].learner->stats().versions, ones[1].learner->stats().versions);
}

}  // namespace
}  // namespace diloco
