// Ways in which other implementations got a merge wrong, one test each.
#include <limits>

#include "merge/jobs.h"

namespace diloco {
namespace {

using test::Floats;
using test::JobBuilder;
using test::tensor;

const Layout kBoth = {{tensor("m", {2, 3}), tensor("v", {6})}};  // a matrix (RDA) and a vector (mean)

// Weighted updates divided by their number instead of the sum of the weights: 0.625 d.
TEST(MergeCases, EqualDeltasMergeToThemselvesWhateverTheWeights) {
  Floats delta(12);
  for (std::size_t i = 0; i < 12; ++i) delta[i] = 0.5f * static_cast<float>(i) - 2.0f;
  const double stale = contribution_weight(Weights::kEqual, 100, 10, 1.0, 3);
  EXPECT_DOUBLE_EQ(stale, 0.25);
  JobBuilder builder(kBoth, Floats(12));
  builder.add(delta, 1.0, "a").add(delta, stale, "b");
  const Floats got = test::merged_from_zero(builder);
  for (std::size_t i = 0; i < 12; ++i) EXPECT_NEAR(got[i], delta[i], 1e-6) << i;
}

// A mean of means is not the mean.
TEST(MergeCases, TokensDecide) {
  const auto merged = [](Weights kind) {
    JobBuilder builder({{tensor("v", {1})}}, Floats(1));
    builder.add({1.0f}, contribution_weight(kind, 1000, 10, 0.0, 0), "a");
    builder.add({0.0f}, contribution_weight(kind, 3000, 10, 0.0, 0), "b");
    return test::merged_from_zero(builder)[0];
  };
  EXPECT_FLOAT_EQ(merged(Weights::kTokens), 0.25f);
  EXPECT_FLOAT_EQ(merged(Weights::kEqual), 0.5f);
  EXPECT_FLOAT_EQ(merged(Weights::kTokensPerStep), 0.1f);  // 1000^2 against 3000^2
}

// An expert that only one of two learners trained counts with a zero displacement from the other: it moves by the
// first one's share, in RDA too, where zero has no direction but a norm.
TEST(MergeCases, AnIdleExpertMovesByTheShareOfWhoTrainedIt) {
  JobBuilder builder(kBoth, Floats(12));
  builder.add(Floats(12, 1.0f), 3.0, "trained").add(Floats(12, 0.0f), 1.0, "idle");
  const Floats got = test::merged_from_zero(builder);
  for (std::size_t i = 0; i < 12; ++i) EXPECT_NEAR(got[i], 0.75f, 1e-6) << i;
}

// Changes of a thousandth vanish in a bf16 weight, so they are summed up in f32 and the image follows.
TEST(MergeCases, Bf16WeightsFollowTheSumOfSmallChanges) {
  const Floats start = {1.0f, -2.0f, 0.5f, 3.0f, 1.5f, -0.75f};
  JobBuilder builder({{tensor("w", {2, 3}, Dtype::kBf16)}}, start, {}, WireDtype::kF32, WireDtype::kParam);
  builder.job.outer = {OuterKind::kSgd, 0.7f, 0.0f};
  Floats delta(6);
  for (std::size_t i = 0; i < 6; ++i) delta[i] = 1e-3f * start[i];
  builder.add(delta, 1.0);
  MergeResult result;
  for (int round = 0; round < 100; ++round) {
    result = run_merge(builder.job);
    ASSERT_TRUE(result.ok);
    builder.job.previous = result.next;
  }
  Floats image(6);
  decode_payload(builder.job.out, result.image.bytes->data(), image.data());
  const Floats theta = test::floats_of(*result.next->theta);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_NEAR(theta[i], start[i] * (1.0f - 0.07f), 1e-5 * std::fabs(start[i])) << i;
    EXPECT_LE(std::fabs(image[i] - theta[i]), std::fabs(theta[i]) / 256.0f) << i;  // one rounding
  }
}

// One codec and one byte length per tensor, never that of the first one: f32 vectors between bf16 matrices.
TEST(MergeCases, EveryTensorKeepsItsOwnElementType) {
  const Layout mixed = {{tensor("a.norm", {5}), tensor("b.weight", {3, 3}, Dtype::kBf16), tensor("c.norm", {7}),
                         tensor("d.weight", {2, 5}, Dtype::kBf16)}};
  JobBuilder builder(mixed, Floats(31), {}, WireDtype::kBf16, WireDtype::kParam);
  Floats delta(31);
  for (std::size_t i = 0; i < 31; ++i) delta[i] = 1.0f + static_cast<float>(i) / 4096.0f;  // needs more than bf16
  builder.add(delta, 1.0);
  const Floats got = test::merged_from_zero(builder);
  for (const Segment& segment : builder.job.in.segments) {
    EXPECT_EQ(segment.byte_offset % 64, 0u);
    for (std::uint64_t i = segment.element_offset; i < segment.element_offset + segment.numel; ++i) {
      const bool exact = mixed.tensors[segment.tensor].shape.size() == 1;
      EXPECT_NEAR(got[i], delta[i], exact ? 0.0 : 1.0 / 128) << i;
    }
  }
}

// Sizes that do not fit 32 bits, by the layout alone.
TEST(MergeCases, MoreThanTwoToThe31Elements) {
  const std::int64_t many = (std::int64_t{1} << 31) + 8;
  const Layout layout = {{tensor("embed", {many, 1}, Dtype::kBf16), tensor("z", {4})}};
  const Plan plan = make_plan(layout, Fragmenter::kBalanced, 1);
  const PayloadLayout up = payload_layout(layout, plan, 0, PayloadKind::kContribution, {});
  EXPECT_EQ(up.segments[0].numel, static_cast<std::uint64_t>(many));
  EXPECT_EQ(up.segments[1].element_offset, static_cast<std::uint64_t>(many));
  EXPECT_EQ(up.segments[1].byte_offset, static_cast<std::uint64_t>(many) * 2 + 48);  // the next multiple of 64
  EXPECT_EQ(payload_layout(layout, plan, 0, PayloadKind::kAnchor, {}).bytes, static_cast<std::uint64_t>(many) * 4 + 32 + 16);
}

}  // namespace
}  // namespace diloco
