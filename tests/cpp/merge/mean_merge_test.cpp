#include <gtest/gtest.h>

#include "merge/jobs.h"

namespace diloco {
namespace {

using test::Doubles;
using test::Floats;
using test::JobBuilder;
using test::tensor;

Layout vector_of(std::int64_t n) { return {{tensor("bias", {n})}}; }

TEST(MeanMerge, GoldenValues) {
  JobBuilder equal(vector_of(2), Floats(2));
  equal.add({3, 0}, 5.0).add({0, 4}, 5.0);
  EXPECT_EQ(test::merged_from_zero(equal), (Floats{1.5f, 2.0f}));
  JobBuilder weighted(vector_of(2), Floats(2));
  weighted.add({3, 0}, 1.0).add({0, 4}, 3.0);
  EXPECT_EQ(test::merged_from_zero(weighted), (Floats{0.75f, 3.0f}));
}

// F106: weights are divided by their sum, not by the number of members.
TEST(MeanMerge, EqualDisplacementsMergeToThemselves) {
  JobBuilder builder(vector_of(1), Floats(1));
  builder.add({0.625f}, 1.0).add({0.625f}, 0.25);
  EXPECT_NEAR(test::merged_from_zero(builder)[0], 0.625f, 1e-7);
}

// F112: 1000 tokens with 1, 3000 tokens with 0.
TEST(MeanMerge, TokensDecide) {
  JobBuilder builder(vector_of(1), Floats(1));
  builder.add({1.0f}, contribution_weight(Weights::kTokens, 1000, 10, 0.0, 0));
  builder.add({0.0f}, contribution_weight(Weights::kTokens, 3000, 30, 0.0, 0));
  EXPECT_EQ(test::merged_from_zero(builder)[0], 0.25f);
}

// Stated bound: (M + 2) * 2^-24 * sum |w_i v_i| per element.
TEST(MeanMerge, WithinTheStatedBoundOfDoublePrecision) {
  const std::uint64_t n = 10000;
  for (const std::size_t count : {2, 3, 8, 33}) {
    std::vector<Floats> vectors;
    Doubles weights;
    JobBuilder builder(vector_of(static_cast<std::int64_t>(n)), Floats(n));
    for (std::size_t m = 0; m < count; ++m) {
      vectors.push_back(test::random_floats(n, m, 0.01f * static_cast<float>(m + 1)));
      weights.push_back(1.0 + static_cast<double>(m) * 0.7);
      builder.add(vectors[m], weights[m]);
    }
    std::vector<Floats> magnitudes = vectors;
    for (Floats& vector : magnitudes) {
      for (float& value : vector) value = std::fabs(value);
    }
    const Doubles expected = test::reference_mean(vectors, weights);
    const Doubles magnitude = test::reference_mean(magnitudes, weights);
    const Floats got = test::merged_from_zero(builder);
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_LE(std::fabs(got[i] - expected[i]), static_cast<double>(count + 2) * 0x1p-24 * magnitude[i]) << count << " " << i;
    }
  }
}

TEST(MeanMerge, MembersWithoutWeightAreLeftOut) {
  JobBuilder with(vector_of(3), Floats(3)), without(vector_of(3), Floats(3));
  with.add({9, 9, 9}, 0.0).add({1, 2, 3}, 2.0).add({8, 8, 8}, 0.0).add({3, 2, 1}, 1.0);
  without.add({1, 2, 3}, 2.0).add({3, 2, 1}, 1.0);
  EXPECT_EQ(test::bits_of(test::merged_from_zero(with)), test::bits_of(test::merged_from_zero(without)));
}

// Absent is not zero, but a real zero counts.
TEST(MeanMerge, ZeroDisplacementsCount) {
  JobBuilder builder(vector_of(1), Floats(1));
  builder.add({1.0f}, 1.0).add({0.0f}, 1.0);
  EXPECT_EQ(test::merged_from_zero(builder)[0], 0.5f);
}

}  // namespace
}  // namespace diloco
