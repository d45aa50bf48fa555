// F014: tensors that learners add to the model while they train.
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <nlohmann/json.hpp>

#include "diloco/base/errors.h"
#include "learner/net_test.h"

namespace diloco {
namespace {

using namespace testing;

const std::vector<NamedShape> kHead = {{"head.weight", {5, 3}}, {"head.bias", {5}}};

struct Growth : NetTest {
  struct One {
    Bowl bowl;
    std::unique_ptr<Learner> learner;
  };

  void start(Mode mode = Mode::kDecoupled, std::uint32_t quorum = 2) {
    options.settings = small_settings();
    options.settings.mode = mode;
    options.settings.min_quorum = quorum;
    options.log = [this](LogLevel, const std::string& text) {
      const std::lock_guard lock(mutex);
      lines += text + "\n";
    };
    syncer = net.syncer(options);
    options.bind = syncer->endpoint();
  }
  One& join(const std::string& id, std::vector<NamedShape> shapes = bowl_shapes()) {
    ones.push_back({Bowl(static_cast<float>(ones.size() + 1), std::move(shapes)), nullptr});
    ones.back().learner = net.learner(syncer->endpoint(), named(id), ones.back().bowl.store);
    EXPECT_TRUE(ones.back().learner->join(20));
    return ones.back();
  }
  void add(One& one, const std::vector<NamedShape>& shapes, float value = 0.0f) {
    one.bowl.store->append(shapes, value);
    one.learner->grow();
  }
  // All train in turn, on this thread; lockstep would wait for the others.
  bool train(const std::function<bool()>& done, Seconds limit_s = 30) {
    const TimePoint deadline = monotonic_now() + limit_s;
    while (!done()) {
      if (monotonic_now() > deadline) return false;
      compute();
      for (One& one : ones) {
        if (!one.learner) continue;
        one.bowl.step(0.05f);
        one.learner->boundary({1});
      }
    }
    return true;
  }
  // Every fragment it knows has been merged at least `n` times.
  static bool merged(const One& one, std::uint64_t n, std::size_t fragments) {
    const auto versions = one.learner->stats().versions;
    return versions.size() == fragments && std::all_of(versions.begin(), versions.end(), [&](const Version& v) { return v.n >= n; });
  }
  std::size_t tensors() { return syncer->layout().tensors.size(); }
  std::string said() {
    const std::lock_guard lock(mutex);
    return lines;
  }
  bool heard(const std::string& text) { return said().find(text) != std::string::npos; }
  static void add_up(const One& one) {
    const LearnerStats stats = one.learner->stats();
    std::uint64_t sum = stats.tokens_merged + stats.tokens_outstanding;
    for (const auto& [reason, tokens] : stats.discarded) sum += tokens;
    EXPECT_EQ(sum, stats.tokens * stats.versions.size());
  }

  std::mutex mutex;
  std::string lines;
  SyncerOptions options;
  std::unique_ptr<Syncer> syncer;
  std::vector<One> ones;
};
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
  // Each on a thread of its own: in lockstep a boundary waits for the other's.
  const auto run = [](One& one, int add_at, int steps) {
    for (int step = 1; step <= steps; ++step) {
      if (step == add_at) {
        one.bowl.store->append(kHead, 0.5f);
        one.learner->grow();
      }
      one.bowl.step(0.05f);
      one.learner->boundary({1});
    }
  };
  std::thread first([&] { run(ones[0], 50, 160); }), second([&] { run(ones[1], 50, 160); });
  first.join(), second.join();
  EXPECT_EQ(tensors(), 6u);
  for (One& one : ones) {
    EXPECT_TRUE(merged(one, 3, 3)) << said();
    add_up(one);
  }
  EXPECT_EQ(ones[0].learner->stats().versions, ones[1].learner->stats().versions);
}

}  // namespace
}  // namespace diloco
