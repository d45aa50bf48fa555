// What must never happen to theta: Inf, NaN, a move without a contribution, a read outside of a payload.
#include <gtest/gtest.h>

#include <limits>

#include "diloco/base/errors.h"
#include "merge/jobs.h"

namespace diloco {
namespace {

using test::Floats;
using test::JobBuilder;
using test::tensor;

Layout matrix_and_vector() { return {{tensor("a", {2, 2}), tensor("b", {3})}}; }

TEST(RunMergeSafety, AllWeightsZeroMeansNoOuterStep) {
  const Floats theta = {1.5f, -0.0f, 1e-40f, 4, 5, 6, 7};
  const Floats momentum(7, 0.25f);
  JobBuilder builder(matrix_and_vector(), theta, momentum);
  builder.nesterov(0.7f, 0.9f).add(Floats(7, 1.0f), 0.0).add(Floats(7, 2.0f), 0.0);
  const MergeResult result = run_merge(builder.job);
  ASSERT_TRUE(result.ok);
  EXPECT_EQ(test::bits_of(test::floats_of(*result.next->theta)), test::bits_of(theta));
  EXPECT_EQ(test::floats_of(*result.next->outer_state), momentum);
  EXPECT_EQ(result.delta_norm, 0.0);
  EXPECT_EQ(result.image.checksums.size(), 1u);
}

TEST(RunMergeSafety, WeightsThatAreNoWeightsAreIgnored) {
  JobBuilder builder(matrix_and_vector(), Floats(7));
  builder.add(Floats(7, 1.0f), -5.0).add(Floats(7, 2.0f), 1.0);
  builder.add(Floats(7, 3.0f), std::numeric_limits<double>::quiet_NaN());
  builder.add(Floats(7, 4.0f), std::numeric_limits<double>::infinity());
  EXPECT_EQ(test::merged_from_zero(builder), Floats(7, 2.0f));
}

TEST(RunMergeSafety, ATensorWithoutDisplacementStaysBitEqual) {
  const Floats theta = {0.1f, -0.0f, 1e-42f, 3e38f, 5, 6, 7};
  JobBuilder builder(matrix_and_vector(), theta);
  builder.add({0, 0, 0, 0, 1, 1, 1}, 1.0).add({0, 0, 0, 0, 2, 2, 2}, 1.0);
  const MergeResult result = run_merge(builder.job);
  ASSERT_TRUE(result.ok);
  const Floats next = test::floats_of(*result.next->theta);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(test::bits(next[i]), test::bits(theta[i])) << i;
  EXPECT_EQ(next[4], 3.5f);
}

void expect_refused(const JobBuilder& builder, std::size_t largest) {
  const MergeResult result = run_merge(builder.job);
  EXPECT_FALSE(result.ok);
  EXPECT_EQ(result.next, nullptr);
  EXPECT_EQ(result.image.bytes, nullptr);
  EXPECT_EQ(result.largest_member, largest);
}

TEST(RunMergeSafety, HugeValuesNeverBecomeInf) {
  for (const float huge : {1e38f, std::numeric_limits<float>::max()}) {
    JobBuilder builder(matrix_and_vector(), Floats(7, 3e38f));
    builder.add(Floats(7, 0.1f), 1.0).add(Floats(7, -huge), 50.0).add(Floats(7, 0.2f), 1.0);
    expect_refused(builder, 1);
  }
}

TEST(RunMergeSafety, HugeValuesNeverBecomeInfInTheOuterState) {
  const float huge = std::numeric_limits<float>::max();
  JobBuilder builder({{tensor("b", {3})}}, Floats(3), Floats(3, huge));
  builder.nesterov(1e-30f, 0.9f).add(Floats(3, huge / 2), 1.0);
  expect_refused(builder, 0);
}

TEST(RunMergeSafety, HugeValuesNeverBecomeInfInABf16Image) {
  // Finite in f32, but the nearest bf16 is Inf.
  JobBuilder builder({{tensor("b", {3}, Dtype::kBf16)}}, Floats(3), {}, WireDtype::kF32, WireDtype::kParam);
  builder.add(Floats(3, 3.4e38f), 1.0);
  expect_refused(builder, 0);
  JobBuilder wide({{tensor("b", {3}, Dtype::kF32)}}, Floats(3), {}, WireDtype::kF32, WireDtype::kParam);
  wide.add(Floats(3, 3.4e38f), 1.0);
  EXPECT_TRUE(run_merge(wide.job).ok);
}

// Whatever finite payloads come: either a finite state or a refusal.
TEST(RunMergeSafety, RandomMagnitudes) {
  std::mt19937_64 engine(1);
  int refused = 0;
  for (int round = 0; round < 500; ++round) {
    JobBuilder builder(matrix_and_vector(), test::random_floats(7, static_cast<std::uint64_t>(round)), Floats(7));
    builder.nesterov(0.7f, 0.9f);
    for (int m = 0; m < 3; ++m) {
      Floats v(7);
      for (float& value : v) {
        do {
          value = test::from_bits(static_cast<std::uint32_t>(engine()));
        } while (!std::isfinite(value));
      }
      builder.add(v, 1.0);
    }
    const MergeResult result = run_merge(builder.job);
    refused += result.ok ? 0 : 1;
    if (!result.ok) continue;
    for (const float value : test::floats_of(*result.next->theta)) ASSERT_TRUE(std::isfinite(value));
    for (const float value : test::floats_of(*result.next->outer_state)) ASSERT_TRUE(std::isfinite(value));
  }
  EXPECT_LT(refused, 500);
}

// Screening keeps these out; should one get through it is the one to drop.
TEST(RunMergeSafety, NonFinitePayloads) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (std::size_t at = 0; at < 7; ++at) {
      JobBuilder builder(matrix_and_vector(), Floats(7));
      Floats spoiled(7, 1.0f);
      spoiled[at] = bad;
      builder.add(Floats(7, 1e30f), 1.0).add(spoiled, 1.0);
      expect_refused(builder, 1);
    }
  }
}

TEST(RunMergeSafety, MembersWithoutWeightAreNeverTheOneToDrop) {
  JobBuilder builder(matrix_and_vector(), Floats(7, 3e38f));
  builder.add(Floats(7, 3e38f), 0.0).add(Floats(7, -2e38f), 1.0);
  expect_refused(builder, 1);
}

TEST(RunMergeSafety, AMemberWithoutWeightMayBeNan) {
  JobBuilder builder(matrix_and_vector(), Floats(7));
  builder.add(Floats(7, std::numeric_limits<float>::quiet_NaN()), 0.0).add(Floats(7, 1.0f), 1.0);
  EXPECT_EQ(test::merged_from_zero(builder), Floats(7, 1.0f));
}

TEST(RunMergeSafety, ContradictorySizesThrow) {
  const auto fresh = [] {
    JobBuilder builder(matrix_and_vector(), Floats(7), Floats(7));
    builder.nesterov(1.0f, 0.5f).add(Floats(7, 1.0f), 1.0);
    return builder.job;
  };
  EXPECT_NO_THROW(run_merge(fresh()));
  MergeJob job = fresh();
  job.members[0].payload = Buffer::make(job.in.bytes - 1);
  EXPECT_THROW(run_merge(job), ConfigError);
  job = fresh();
  job.members[0].norms.pop_back();
  EXPECT_THROW(run_merge(job), ConfigError);
  job = fresh();
  job.use_rda.clear();
  EXPECT_THROW(run_merge(job), ConfigError);
  job = fresh();
  job.previous = test::state_of(Floats(6), Floats(7));
  EXPECT_THROW(run_merge(job), ConfigError);
  job = fresh();
  job.previous = test::state_of(Floats(7));
  EXPECT_THROW(run_merge(job), ConfigError);
  job = fresh();
  job.previous = nullptr;
  EXPECT_THROW(run_merge(job), ConfigError);
  job = fresh();
  job.out.segments.pop_back();
  EXPECT_THROW(run_merge(job), ConfigError);
}

}  // namespace
}  // namespace diloco
