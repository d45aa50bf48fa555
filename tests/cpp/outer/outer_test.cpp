#include "diloco/outer/outer.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "kernels/arrays.h"

namespace diloco {
namespace {

using test::Floats;

OuterOptions nesterov(float lr, float momentum) { return {OuterKind::kNesterov, lr, momentum}; }

TEST(Outer, StateSizes) {
  EXPECT_EQ(outer_state_floats({OuterKind::kSgd, 1.0f, 0.0f}), 0u);
  EXPECT_EQ(outer_state_floats(nesterov(0.7f, 0.9f)), 1u);
}

// Theta 1, gradient 0.1, lr 0.7, momentum 0.9.
TEST(Outer, NesterovGoldenValues) {
  const float gradient = 0.1f;
  float theta = 1.0f;
  float state = 0.0f;
  const std::array<float, 3> thetas = {0.867f, 0.6773f, 0.43657f};
  const std::array<float, 3> states = {0.1f, 0.19f, 0.271f};
  for (int step = 0; step < 3; ++step) {
    outer_step(nesterov(0.7f, 0.9f), &gradient, &theta, &state, &theta, &state, 1);
    EXPECT_NEAR(theta, thetas[step], 1e-6) << step;
    EXPECT_NEAR(state, states[step], 1e-6) << step;
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
    outer_step(nesterov(0.7f, 0.9f), gradients[step].data(), theta.data(), state.data(), theta.data(), state.data(), 4);
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
  outer_step({}, gradient.data(), anchor.data(), nullptr, theta.data(), nullptr, 5000);
  for (std::size_t i = 0; i < 5000; ++i) {
    ASSERT_EQ(theta[i], anchor[i] - gradient[i]);
    ASSERT_NEAR(theta[i], local[i], 1.2e-7 * (std::fabs(anchor[i]) + std::fabs(local[i])));
  }
}

TEST(Outer, DescendsAQuadraticBowl) {
  for (const OuterOptions& options : {OuterOptions{OuterKind::kSgd, 0.5f, 0.0f}, nesterov(0.1f, 0.9f)}) {
    Floats theta(3, 10.0f), state(3);
    for (int step = 0; step < 200; ++step) {
      const Floats gradient = theta;
      outer_step(options, gradient.data(), theta.data(), state.data(), theta.data(), state.data(), 3);
    }
    EXPECT_LT(std::fabs(theta[0]), 1e-3f);
  }
}

TEST(Outer, ZeroGradientKeepsSgdBitEqualAndDecaysMomentum) {
  const Floats gradient(3);
  const Floats theta = {1.5f, -0.0f, 1e-40f};
  Floats out(3);
  outer_step({OuterKind::kSgd, 0.7f, 0.0f}, gradient.data(), theta.data(), nullptr, out.data(), nullptr, 3);
  EXPECT_EQ(test::bits_of(out), test::bits_of(theta));
  const Floats state = {1.0f, 1.0f, 1.0f};
  Floats next_state(3);
  outer_step(nesterov(0.7f, 0.5f), gradient.data(), theta.data(), state.data(), out.data(), next_state.data(), 3);
  EXPECT_EQ(next_state, Floats(3, 0.5f));
}

TEST(Outer, FreshBuffersAndInPlaceAgree) {
  const std::uint64_t n = 4099;
  const Floats gradient = test::random_floats(n, 1), theta = test::random_floats(n, 2), state = test::random_floats(n, 3);
  Floats theta_out(n), state_out(n), theta_here = theta, state_here = state;
  outer_step(nesterov(0.3f, 0.9f), gradient.data(), theta.data(), state.data(), theta_out.data(), state_out.data(), n);
  outer_step(nesterov(0.3f, 0.9f), gradient.data(), theta_here.data(), state_here.data(), theta_here.data(),
             state_here.data(), n);
  EXPECT_EQ(test::bits_of(theta_out), test::bits_of(theta_here));
  EXPECT_EQ(test::bits_of(state_out), test::bits_of(state_here));
  // Two roundings per operation, never a fused one: the same bits on every instruction set.
  for (std::uint64_t i = 0; i < n; ++i) {
    volatile float decayed = 0.9f * state[i];
    volatile float momentum = decayed + gradient[i];
    ASSERT_EQ(state_out[i], momentum);
  }
}

TEST(Outer, NothingToDo) { outer_step({}, nullptr, nullptr, nullptr, nullptr, nullptr, 0); }

}  // namespace
}  // namespace diloco
