#include "diloco/outer/outer.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "kernels/arrays.h"

namespace diloco {
namespace {

using test::Floats;

OuterOptions nesterov(float lr, float momentum) { return {OuterKind::kNesterov, lr, momentum}; }
OuterOptions delayed(std::uint32_t n, float c) { return {OuterKind::kDelayedNesterov, 0.7f, 0.9f, 0.0f, 0.0f, n, c}; }

// In place.
void step_on(const OuterOptions& options, std::uint64_t step, const Floats& gradient, Floats* theta, Floats* state) {
  const std::uint64_t n = gradient.size();
  outer_step(options, step, gradient.data(), theta->data(), {state->data(), n}, theta->data(), {state->data(), n}, n);
}

TEST(Outer, StateSizes) {
  EXPECT_EQ(outer_state_floats({OuterKind::kSgd, 1.0f, 0.0f}), 0u);
  EXPECT_EQ(outer_state_floats(nesterov(0.7f, 0.9f)), 1u);
  EXPECT_EQ(outer_state_floats({OuterKind::kAdam}), 2u);
  EXPECT_EQ(outer_state_floats(delayed(4, 0.0f)), 2u);
}

// Theta 1, gradient 0.1, lr 0.7, momentum 0.9.
TEST(Outer, NesterovGoldenValues) {
  Floats theta = {1.0f}, state = {0.0f};
  const std::array<float, 3> thetas = {0.867f, 0.6773f, 0.43657f};
  const std::array<float, 3> states = {0.1f, 0.19f, 0.271f};
  for (int step = 0; step < 3; ++step) {
    step_on(nesterov(0.7f, 0.9f), step, {0.1f}, &theta, &state);
    EXPECT_NEAR(theta[0], thetas[step], 1e-6) << step;
    EXPECT_NEAR(state[0], states[step], 1e-6) << step;
  }
}

// Recorded from torch.optim.SGD(lr=0.7, momentum=0.9, nesterov=True), torch 2.13, three steps on four elements.
TEST(Outer, NesterovFollowsTorch) {
  const std::array<Floats, 3> gradients = {
      Floats{0.1f, 0.3f, -0.02f, 1e-4f}, {0.1f, -0.7f, 0.5f, -2e-3f}, {0.1f, 0.01f, -0.25f, 4e-5f}};
  const std::array<Floats, 3> thetas = {Floats{0.866999984f, -2.89899993f, 0.151600003f, 0.00286699994f},
                                        {0.677299976f, -2.13809991f, -0.502059996f, 0.00547030009f},
                                        {0.436569989f, -1.90758991f, -0.442853987f, 0.00650006998f}};
  const std::array<Floats, 3> states = {Floats{0.100000001f, 0.300000012f, -0.0199999996f, 9.99999975e-05f},
                                        {0.189999998f, -0.429999977f, 0.481999993f, -0.00191000011f},
                                        {0.270999998f, -0.376999974f, 0.183799982f, -0.0016790001f}};
  Floats theta = {1.0f, -2.5f, 0.125f, 3e-3f};
  Floats state(4);
  for (std::size_t step = 0; step < 3; ++step) {
    step_on(nesterov(0.7f, 0.9f), step, gradients[step], &theta, &state);
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(theta[i], thetas[step][i], 3e-7 * std::fabs(thetas[step][i])) << step << " " << i;
      EXPECT_NEAR(state[i], states[step][i], 3e-7 * std::fabs(states[step][i])) << step << " " << i;
    }
  }
}

// The gradient points to where it came from: stepping must subtract it.
TEST(Outer, SgdWithLrOneReturnsTheLocalValue) {
  const Floats anchor = test::random_floats(5000, 1);
  const Floats local = test::random_floats(5000, 2);
  Floats gradient(5000), theta(5000);
  for (std::size_t i = 0; i < 5000; ++i) gradient[i] = anchor[i] - local[i];
  outer_step({}, 0, gradient.data(), anchor.data(), {}, theta.data(), {}, 5000);
  for (std::size_t i = 0; i < 5000; ++i) {
    ASSERT_EQ(theta[i], anchor[i] - gradient[i]);
    ASSERT_NEAR(theta[i], local[i], 1.2e-7 * (std::fabs(anchor[i]) + std::fabs(local[i])));
  }
}

TEST(Outer, DescendsAQuadraticBowl) {
  for (const OuterOptions& options : {OuterOptions{OuterKind::kSgd, 0.5f, 0.0f}, nesterov(0.1f, 0.9f),
                                      OuterOptions{OuterKind::kAdam, 0.3f, 0.9f, 0.95f, 0.1f}, delayed(2, 0.25f)}) {
    Floats theta(3, 10.0f), state(6);
    for (int step = 0; step < 400; ++step) {
      const Floats gradient = {0.1f * theta[0], 0.1f * theta[1], 0.1f * theta[2]};
      step_on(options, step, gradient, &theta, &state);
    }
    EXPECT_LT(std::fabs(theta[0]), 1e-3f);
  }
}

TEST(Outer, ZeroGradientKeepsSgdBitEqualAndDecaysMomentum) {
  const Floats gradient(3);
  const Floats theta = {1.5f, -0.0f, 1e-40f};
  Floats out(3);
  outer_step({OuterKind::kSgd, 0.7f, 0.0f}, 0, gradient.data(), theta.data(), {}, out.data(), {}, 3);
  EXPECT_EQ(test::bits_of(out), test::bits_of(theta));
  const Floats state = {1.0f, 1.0f, 1.0f};
  Floats next_state(3);
  outer_step(nesterov(0.7f, 0.5f), 0, gradient.data(), theta.data(), {state.data()}, out.data(), {next_state.data()}, 3);
  EXPECT_EQ(next_state, Floats(3, 0.5f));
}

TEST(Outer, FreshBuffersAndInPlaceAgree) {
  const std::uint64_t n = 4099;
  const Floats gradient = test::random_floats(n, 1), theta = test::random_floats(n, 2), state = test::random_floats(n, 3);
  Floats theta_out(n), state_out(n), theta_here = theta, state_here = state;
  outer_step(nesterov(0.3f, 0.9f), 0, gradient.data(), theta.data(), {state.data()}, theta_out.data(),
             {state_out.data()}, n);
  step_on(nesterov(0.3f, 0.9f), 0, gradient, &theta_here, &state_here);
  EXPECT_EQ(test::bits_of(theta_out), test::bits_of(theta_here));
  EXPECT_EQ(test::bits_of(state_out), test::bits_of(state_here));
  // Two roundings per operation, never a fused one: the same bits on every instruction set.
  for (std::uint64_t i = 0; i < n; ++i) {
    volatile float decayed = 0.9f * state[i];
    volatile float momentum = decayed + gradient[i];
    ASSERT_EQ(state_out[i], momentum);
  }
}

TEST(Outer, NothingToDo) { outer_step({}, 0, nullptr, nullptr, {}, nullptr, {}, 0); }

// Async Local-SGD, Algorithm 3, with gradient 1, beta 0.9, lr 0.7, theta 0: worked out by hand.
TEST(DelayedNesterov, GoldenValues) {
  const std::vector<std::pair<OuterOptions, Floats>> cases = {
      {delayed(1, 0.0f), {-1.33f, -3.227f, -5.6343f}},
      {delayed(2, 0.0f), {-0.35f, -1.33f, -1.68f, -3.227f, -3.577f, -5.6343f}},
      {delayed(2, 0.1f), {-0.35f, -1.267f, -1.68f, -3.1073f, -3.577f, -5.46357f}}};
  for (const auto& [options, expected] : cases) {
    Floats theta = {0.0f}, state = {0.0f, 0.0f};
    for (std::size_t step = 0; step < expected.size(); ++step) {
      step_on(options, step, {1.0f}, &theta, &state);
      EXPECT_NEAR(theta[0], expected[step], 2e-6) << options.delay << " " << options.delay_c << " step " << step;
    }
  }
}

// As many equal gradients as learners make one step of the synchronous optimizer.
TEST(DelayedNesterov, LandsOnTheSynchronousTrajectory) {
  for (const std::uint32_t n : {1u, 3u, 4u, 8u}) {
    Floats theta = {2.0f}, state(2), sync_theta = {2.0f}, sync_state(1);
    for (std::uint64_t round = 0; round < 10; ++round) {
      const float gradient = round % 2 == 0 ? 0.3f : -0.1f;
      for (std::uint64_t i = 0; i < n; ++i) step_on(delayed(n, 0.0f), round * n + i, {gradient}, &theta, &state);
      step_on(nesterov(0.7f, 0.9f), round, {gradient}, &sync_theta, &sync_state);
      EXPECT_NEAR(theta[0], sync_theta[0], 2e-6) << n << " round " << round;
    }
  }
}

// Measured by stepping on a constant gradient.
TEST(OuterGain, IsHowFarThetaMoves) {
  for (const OuterOptions& options : {OuterOptions{OuterKind::kSgd, 0.3f}, nesterov(0.7f, 0.9f), nesterov(0.4f, 0.5f),
                                      delayed(1, 0.0f), delayed(4, 0.0f), delayed(4, 0.25f)}) {
    Floats theta = {0.0f}, state(2);
    const OuterGain gain = outer_gain(options);
    step_on(options, 0, {1.0f}, &theta, &state);
    EXPECT_NEAR(-theta[0], gain.first, 1e-5);
    for (std::uint64_t step = 1; step < 800; ++step) step_on(options, step, {1.0f}, &theta, &state);
    const float before = theta[0];
    for (std::uint64_t step = 800; step < 840; ++step) step_on(options, step, {1.0f}, &theta, &state);
    EXPECT_NEAR((before - theta[0]) / 40.0, gain.long_run, 2e-3 * gain.long_run);
  }
  EXPECT_DOUBLE_EQ(outer_gain({OuterKind::kAdam}).first, 0.0);
}

TEST(OuterWarnings, NameWhatIsKnownToOvershoot) {
  const auto warnings = [](std::map<std::string, std::string> given) {
    Settings settings;
    for (const auto& [name, value] : given) settings.set(name, value);
    settings.validate();
    return outer_warnings(settings);
  };
  EXPECT_TRUE(warnings({}).empty());
  for (const char* preset : {"decoupled", "streaming", "diloco", "async", "finetune"}) {
    EXPECT_TRUE(warnings({{"preset", preset}}).empty()) << preset;
  }
  const auto one = [&](std::map<std::string, std::string> given, const std::string& words) {
    const auto found = warnings(std::move(given));
    ASSERT_EQ(found.size(), 1u) << words;
    EXPECT_NE(found[0].find(words), std::string::npos) << found[0];
  };
  one({{"preset", "diloco"}, {"sync_every", "4"}}, "multiplies those by up to 7");
  one({{"outer_lr", "2"}, {"sync_every", "100"}}, "goes 2 times as far");
  one({{"preset", "async"}, {"outer_optimizer", "nesterov"}}, "use delayed_nesterov");
}

}  // namespace
}  // namespace diloco
