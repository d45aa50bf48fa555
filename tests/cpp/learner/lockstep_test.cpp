// Lockstep against plain synchronous references.
#include <gtest/gtest.h>

#include <thread>

#include "learner/net_test.h"

namespace diloco {
namespace {

using namespace testing;

using LockstepRun = NetTest;
DILOCO_OVER_BOTH_NETS(LockstepRun);

// Two learners, P = 1, synchronous DiLoCo: H inner SGD steps each, mean of the displacements, outer step.
std::vector<float> reference(std::vector<float> theta, const std::vector<float>& targets, float lr, int inner, int outer,
                             float outer_lr, float mu) {
  std::vector<float> momentum(theta.size(), 0.0f);
  for (int round = 0; round < outer; ++round) {
    std::vector<double> delta(theta.size(), 0.0);
    for (const float target : targets) {
      std::vector<float> local = theta;
      for (int step = 0; step < inner; ++step) {
        for (float& w : local) w -= lr * (w - target);
      }
      for (std::size_t i = 0; i < local.size(); ++i) delta[i] += (theta[i] - local[i]) / static_cast<double>(targets.size());
    }
    for (std::size_t i = 0; i < theta.size(); ++i) {
      momentum[i] = mu * momentum[i] + static_cast<float>(delta[i]);
      theta[i] -= outer_lr * (static_cast<float>(delta[i]) + mu * momentum[i]);
    }
  }
  return theta;
}

Settings lockstep_settings() {
  Settings settings = small_settings();
  settings.mode = Mode::kLockstep;
  settings.num_fragments = 1;
  settings.sync_every = 5;
  settings.overlap_steps = 0;
  settings.min_quorum = 2;
  settings.adopt = Adopt::kOverwrite;
  settings.merge = MergeKind::kMean;
  settings.wire_dtype = WireDtype::kF32;
  return settings;
}

void expect_reference(Net& net, const Settings& settings) {
  SyncerOptions options;
  options.settings = settings;
  const auto syncer = net.syncer(options);
  const std::vector<float> targets = {1.0f, -3.0f};
  std::vector<Bowl> bowls;
  std::vector<std::unique_ptr<Learner>> learners;
  for (int i = 0; i < 2; ++i) {
    bowls.emplace_back(targets[i], bowl_shapes(), 8.0f);
    learners.push_back(net.learner(syncer->endpoint(), named("twin-" + std::to_string(i)), bowls[i].store));
  }
  for (auto& learner : learners) ASSERT_TRUE(learner->join(20));
  constexpr int kOuter = 5;
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      const TimePoint deadline = monotonic_now() + 60;
      for (std::uint32_t step = 0; step < kOuter * settings.sync_every; ++step) {
        bowls[i].step(0.1f);
        learners[i]->boundary({1}, [&] {
          if (monotonic_now() > deadline) throw std::runtime_error("lockstep held for too long");
        });
      }
    });
  }
  for (auto& thread : threads) thread.join();
  const float mu = settings.outer_optimizer == OuterKind::kNesterov ? static_cast<float>(settings.outer_momentum) : 0.0f;
  const auto expected = reference(std::vector<float>(1, 8.0f), targets, 0.1f, static_cast<int>(settings.sync_every), kOuter,
                                  static_cast<float>(settings.outer_lr), mu);
  for (const Bowl& bowl : bowls) EXPECT_LT(bowl.distance_to(expected[0]), 1e-6 * std::abs(expected[0]) + 1e-6);
  for (const auto& learner : learners) {
    EXPECT_EQ(learner->stats().adoptions, kOuter + 1u);
    EXPECT_EQ(learner->stats().contributions_merged, static_cast<std::uint64_t>(kOuter));
  }
}

TEST_P(LockstepRun, TwoLearnersEqualSynchronousDiLoCo) { expect_reference(net, lockstep_settings()); }

TEST_P(LockstepRun, TwoLearnersEqualSynchronousDiLoCoWithNesterov) {
  Settings settings = lockstep_settings();
  settings.outer_optimizer = OuterKind::kNesterov;
  settings.outer_lr = 0.7;
  settings.outer_momentum = 0.9;
  expect_reference(net, settings);
}

// F097 and the first proof: with one learner, outer SGD lr 1 and an f32 wire, adoption changes nothing.
TEST_P(LockstepRun, OneLearnerEqualsItsBareInnerOptimizer) {
  SyncerOptions options;
  options.settings = lockstep_settings();
  options.settings.min_quorum = 1;
  const auto syncer = net.syncer(options);
  Bowl bowl(2.0f, bowl_shapes(), -4.0f), bare(2.0f, bowl_shapes(), -4.0f);
  const auto learner = net.learner(syncer->endpoint(), named("solo"), bowl.store);
  ASSERT_TRUE(learner->join(20));
  for (int step = 0; step < 50; ++step) {
    bowl.step(0.05f);
    bare.step(0.05f);
    learner->boundary({1});
  }
  EXPECT_EQ(learner->stats().contributions_merged, 10u);
  EXPECT_LT(bowl.distance_to(bare.store->values[0][0]), 1e-5);
}

// A hold can be interrupted: the exception comes out, and the learner can still be closed.
TEST_P(LockstepRun, InterruptingAHoldGetsOut) {
  SyncerOptions options;
  options.settings = lockstep_settings();  // quorum 2, and the other one never comes
  const auto syncer = net.syncer(options);
  Bowl bowl(2.0f);
  const auto learner = net.learner(syncer->endpoint(), named("waiting"), bowl.store);
  ASSERT_TRUE(learner->join(20));
  int steps = 0;
  EXPECT_THROW(
      {
        for (; steps < 100; ++steps) learner->boundary({1}, [] { throw std::runtime_error("Ctrl-C"); });
      },
      std::runtime_error);
  EXPECT_EQ(steps, 4) << "the fifth step is the first that waits";
  learner->close(0.5);
}

}  // namespace
}  // namespace diloco
