#include <gtest/gtest.h>

#include <algorithm>

#include "merge/jobs.h"

namespace diloco {
namespace {

using test::Floats;
using test::JobBuilder;
using test::tensor;

// A matrix above one block, an embedding, a vector, a scalar and an empty tensor, in this order of names.
Layout model() {
  return {{tensor("a.weight", {70, 80}), tensor("b.embed", {10, 8}), tensor("c.bias", {33}), tensor("d.scale", {}),
           tensor("e.empty", {0, 8})}};
}
constexpr std::uint64_t kNumel = 5600 + 80 + 33 + 1;

JobBuilder full_job(WireDtype wire, WireDtype downlink) {
  JobBuilder builder(model(), test::random_floats(kNumel, 1), {}, wire, downlink);
  for (std::uint64_t m = 0; m < 4; ++m) {
    builder.add(test::random_floats(kNumel, 10 + m, 0.01f), 1.0 + static_cast<double>(m), fmt::format("learner-{}", m));
  }
  return builder;
}

TEST(RunMerge, EachTensorByItsRule) {
  JobBuilder builder(model(), Floats(kNumel));
  const std::vector<Floats> vectors = {test::random_floats(kNumel, 1), test::random_floats(kNumel, 2)};
  builder.add(vectors[0], 1.0).add(vectors[1], 3.0);
  const Floats got = test::merged_from_zero(builder);
  for (const Segment& segment : builder.job.in.segments) {
    if (segment.numel == 0) continue;
    const auto part = [&](const Floats& all) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(segment.element_offset);
      return Floats(begin, begin + static_cast<std::ptrdiff_t>(segment.numel));
    };
    const std::vector<Floats> parts = {part(vectors[0]), part(vectors[1])};
    const bool rda = builder.layout.tensors[segment.tensor].name == "a.weight";
    const test::Doubles expected = rda ? test::reference_rda(parts, {1, 3}) : test::reference_mean(parts, {1, 3});
    EXPECT_LE(test::distance(part(got), expected), 1e-6 * test::norm(expected)) << segment.tensor;
  }
}

// One learner, outer SGD with lr 1: theta becomes anchor - (anchor - local), whatever the merge rule.
TEST(RunMerge, OneLearnerWithLrOneLandsOnItsOwnWeights) {
  const Floats anchor = test::random_floats(kNumel, 1);
  const Floats local = test::random_floats(kNumel, 2);
  Floats displacement(kNumel);
  for (std::uint64_t i = 0; i < kNumel; ++i) displacement[i] = anchor[i] - local[i];
  JobBuilder builder(model(), anchor);
  builder.add(displacement, 123.0);
  const MergeResult result = run_merge(builder.job);
  ASSERT_TRUE(result.ok);
  EXPECT_EQ(result.next->version, (Version{1, 8}));
  EXPECT_EQ(result.next->outer_state, nullptr);
  const Floats theta = test::floats_of(*result.next->theta);
  for (std::uint64_t i = 0; i < kNumel; ++i) ASSERT_EQ(theta[i], anchor[i] - displacement[i]) << i;
}

// Theta 1, displacement 0.1, lr 0.7, momentum 0.9.
TEST(RunMerge, NesterovGoldenValuesOverThreeVersions) {
  const float thetas[] = {0.867f, 0.6773f, 0.43657f};
  const float states[] = {0.1f, 0.19f, 0.271f};
  JobBuilder builder({{tensor("x", {1})}}, {1.0f}, {0.0f});
  builder.nesterov(0.7f, 0.9f).add({0.1f}, 5.0);
  for (int step = 0; step < 3; ++step) {
    const MergeResult result = run_merge(builder.job);
    ASSERT_TRUE(result.ok);
    EXPECT_NEAR(result.next->theta->f32()[0], thetas[step], 1e-6);
    EXPECT_NEAR(result.next->outer_state->f32()[0], states[step], 1e-6);
    EXPECT_NEAR(result.delta_norm, 0.1, 1e-8);
    builder.job.previous = result.next;
  }
}

TEST(RunMerge, PreviousStateIsNotTouched) {
  JobBuilder builder(model(), test::random_floats(kNumel, 1), Floats(kNumel, 0.5f));
  builder.nesterov(0.7f, 0.9f).add(test::random_floats(kNumel, 2), 1.0);
  const Floats theta = test::floats_of(*builder.job.previous->theta);
  const Floats state = test::floats_of(*builder.job.previous->outer_state);
  ASSERT_TRUE(run_merge(builder.job).ok);
  EXPECT_EQ(test::bits_of(test::floats_of(*builder.job.previous->theta)), test::bits_of(theta));
  EXPECT_EQ(test::bits_of(test::floats_of(*builder.job.previous->outer_state)), test::bits_of(state));
}

// A bf16 image is a rounding of theta for the way; theta itself keeps every bit, so small updates add up (F104).
TEST(RunMerge, ThetaStaysF32UnderABf16Image) {
  JobBuilder builder({{tensor("w", {1, 1}, Dtype::kBf16)}}, {1.0f}, {}, WireDtype::kF32, WireDtype::kParam);
  builder.add({1e-3f}, 1.0);
  for (int round = 0; round < 100; ++round) {
    const MergeResult result = run_merge(builder.job);
    ASSERT_TRUE(result.ok);
    ASSERT_EQ(result.image.bytes->size(), 2u);
    builder.job.previous = result.next;
  }
  EXPECT_NEAR(builder.job.previous->theta->f32()[0], 0.9f, 1e-5f);
}

TEST(RunMerge, ImageIsTheEncodedTheta) {
  for (const WireDtype downlink : {WireDtype::kF32, WireDtype::kBf16, WireDtype::kParam}) {
    const JobBuilder builder = full_job(WireDtype::kBf16, downlink);
    const MergeResult result = run_merge(builder.job);
    ASSERT_TRUE(result.ok);
    test::Bytes expected(builder.job.out.bytes);
    encode_payload(builder.job.out, result.next->theta->f32(), expected.data());
    EXPECT_TRUE(std::ranges::equal(result.image.bytes->bytes(), expected));
    EXPECT_EQ(result.image.checksums, make_image(result.image.bytes, builder.job.chunk_bytes).checksums);
  }
}

TEST(RunMerge, DeltaNormIsThatOfTheMergedGradient) {
  JobBuilder builder(model(), Floats(kNumel));
  builder.add(test::random_floats(kNumel, 1), 1.0).add(test::random_floats(kNumel, 2), 3.0);
  const MergeResult result = run_merge(builder.job);
  EXPECT_NEAR(result.delta_norm, test::norm(test::doubles(test::floats_of(*result.next->theta))), 1e-9 * result.delta_norm);
}

TEST(RunMerge, ArrivalOrderDoesNotMatter) {
  JobBuilder builder = full_job(WireDtype::kBf16, WireDtype::kParam);
  const MergeResult reference = run_merge(builder.job);
  std::mt19937_64 engine(1);
  for (int round = 0; round < 5; ++round) {
    std::shuffle(builder.job.members.begin(), builder.job.members.end(), engine);  // arrival
    std::sort(builder.job.members.begin(), builder.job.members.end(),
              [](const MergeMember& a, const MergeMember& b) { return a.learner < b.learner; });
    const MergeResult again = run_merge(builder.job);
    EXPECT_EQ(again.image.checksums, reference.image.checksums);
    EXPECT_EQ(test::bits_of(test::floats_of(*again.next->theta)), test::bits_of(test::floats_of(*reference.next->theta)));
    EXPECT_EQ(again.delta_norm, reference.delta_norm);
  }
}

TEST(RunMerge, UnitOfWeightsDoesNotMatter) {
  JobBuilder builder = full_job(WireDtype::kF32, WireDtype::kF32);
  const MergeResult reference = run_merge(builder.job);
  for (MergeMember& member : builder.job.members) member.weight *= 1024.0;
  EXPECT_EQ(run_merge(builder.job).image.checksums, reference.image.checksums);
}

TEST(RunMerge, OnlyEmptyTensors) {
  JobBuilder builder({{tensor("a", {0}), tensor("b", {0, 8})}}, {});
  builder.add({}, 1.0).add({}, 2.0);
  const MergeResult result = run_merge(builder.job);
  ASSERT_TRUE(result.ok);
  EXPECT_EQ(result.next->theta->size(), 0u);
  EXPECT_TRUE(result.image.checksums.empty());
  EXPECT_EQ(result.delta_norm, 0.0);
}

// F026: () and (1,) both move, and as computed by hand.
TEST(RunMerge, ScalarsMove) {
  JobBuilder builder({{tensor("a", {}), tensor("b", {1})}}, {1.0f, 2.0f});
  builder.add({0.5f, 1.0f}, 1.0).add({1.0f, 0.0f}, 1.0);
  for (int round = 1; round <= 5; ++round) {
    builder.job.previous = run_merge(builder.job).next;
    EXPECT_EQ(test::floats_of(*builder.job.previous->theta), (Floats{1.0f - 0.75f * round, 2.0f - 0.5f * round}));
  }
}

}  // namespace
}  // namespace diloco
