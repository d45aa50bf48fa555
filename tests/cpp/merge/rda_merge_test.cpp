#include <gtest/gtest.h>

#include "diloco/merge/segment_merge.h"
#include "merge/jobs.h"

namespace diloco {
namespace {

using test::Doubles;
using test::Floats;
using test::JobBuilder;
using test::tensor;

Layout matrix(std::int64_t columns) { return {{tensor("w", {1, columns})}}; }

Floats merged(const std::vector<Floats>& vectors, const Doubles& weights, WireDtype wire = WireDtype::kF32) {
  JobBuilder builder(matrix(static_cast<std::int64_t>(vectors[0].size())), Floats(vectors[0].size()), {}, wire);
  for (std::size_t m = 0; m < vectors.size(); ++m) builder.add(vectors[m], weights[m]);
  EXPECT_TRUE(builder.job.use_rda[0]);
  return test::merged_from_zero(builder);
}

double length(const Floats& values) { return test::norm(test::doubles(values)); }

TEST(RdaMerge, GoldenValues) {
  const Floats equal = merged({{3, 0}, {0, 4}}, {1, 1});
  EXPECT_NEAR(equal[0], 2.474874, 1e-6);
  EXPECT_NEAR(equal[1], 2.474874, 1e-6);
  const Floats weighted = merged({{3, 0}, {0, 4}}, {1, 3});
  EXPECT_NEAR(weighted[0], 1.185854, 1e-6);
  EXPECT_NEAR(weighted[1], 3.557562, 1e-6);
}

TEST(RdaMerge, OneLearnerIsExact) {
  const Floats v = test::random_floats(10001, 3);
  EXPECT_EQ(test::bits_of(merged({v}, {0.3})), test::bits_of(v));
  // Also if others are there without weight.
  const Floats other = test::random_floats(10001, 4);
  EXPECT_EQ(test::bits_of(merged({other, v, other}, {0.0, 7.0, 0.0})), test::bits_of(v));
}

TEST(RdaMerge, IdenticalInputsGiveTheInput) {
  const Floats v = test::random_floats(1000, 3);
  EXPECT_LE(test::distance(merged({v, v, v}, {1, 2, 3}), test::doubles(v)), 1e-6 * length(v));
}

// With orthogonal displacements of norm R the mean shrinks to R / sqrt(M); RDA keeps R for every M.
TEST(RdaMerge, NormDoesNotDependOnTheNumberOfLearners) {
  for (const std::size_t count : {1, 2, 3, 8, 16, 64}) {
    std::vector<Floats> vectors;
    for (std::size_t m = 0; m < count; ++m) {
      vectors.emplace_back(64, 0.0f);
      vectors.back()[m] = 5.0f;
    }
    EXPECT_NEAR(length(merged(vectors, Doubles(count, 2.0))), 5.0, 1e-5) << count;
  }
}

TEST(RdaMerge, NormIsTheWeightedMeanOfTheNorms) {
  std::vector<Floats> vectors;
  Doubles weights;
  double radius = 0.0;
  double total = 0.0;
  for (std::size_t m = 0; m < 5; ++m) {
    vectors.push_back(test::random_floats(4097, m, static_cast<float>(m + 1)));
    weights.push_back(static_cast<double>(5 - m));
    radius += weights[m] * length(vectors[m]);
    total += weights[m];
  }
  EXPECT_NEAR(length(merged(vectors, weights)), radius / total, 1e-6 * radius / total);
}

TEST(RdaMerge, ZeroVectorsHaveNoDirectionButCountInTheRadius) {
  const Floats got = merged({{3, 0}, {0, 0}, {0, 4}}, {1, 2, 1});
  EXPECT_LE(test::distance(got, test::reference_rda({{3, 0}, {0, 0}, {0, 4}}, {1, 2, 1})), 1e-6);
  EXPECT_NEAR(length(got), (3.0 + 4.0) / 4.0, 1e-6);
  EXPECT_EQ(merged({{8, 0}, {0, 0}}, {1, 3}), (Floats{2, 0}));
  EXPECT_EQ(merged({{0, 0}, {0, 0}}, {1, 3}), (Floats{0, 0}));
}

TEST(RdaMerge, CancellingDirectionsFallBackToTheMean) {
  EXPECT_EQ(merged({{2, 0}, {-1, 0}}, {1, 1}), (Floats{0.5f, 0.0f}));
  EXPECT_EQ(merged({{1, 1}, {-1, -1}}, {1, 1}), (Floats{0, 0}));
  const Floats v = test::random_floats(5000, 1);
  Floats minus = v;
  for (float& value : minus) value *= -3.0f;
  const Floats got = merged({v, minus}, {1, 1});
  for (std::size_t i = 0; i < v.size(); ++i) ASSERT_NEAR(got[i], -v[i], 1e-6 * std::fabs(v[i]) + 1e-12);
}

TEST(RdaMerge, NearlyCancellingDirectionsKeepTheRadius) {
  const Floats got = merged({{1, 1e-3f}, {-1, 1e-3f}}, {1, 1});
  EXPECT_NEAR(got[0], 0.0f, 1e-4f);
  EXPECT_NEAR(got[1], 1.0f, 1e-4f);
}

// Stated bound in norm: (M + 8) * 2^-24 * radius * sum w / ||s||.
TEST(RdaMerge, WithinTheStatedBoundOfDoublePrecision) {
  for (const std::size_t count : {2, 3, 8, 33}) {
    for (const WireDtype wire : {WireDtype::kF32, WireDtype::kBf16}) {
      std::vector<Floats> vectors;
      Doubles weights;
      double radius = 0.0;
      double total = 0.0;
      for (std::size_t m = 0; m < count; ++m) {
        Floats v = test::random_floats(20000, 100 + m, 0.001f * static_cast<float>(m + 1));
        if (wire == WireDtype::kBf16) {
          const test::Bytes narrow = test::bf16_bytes_of(v);
          kernels::bf16_to_f32(narrow.data(), v.size(), v.data());
        }
        vectors.push_back(v);
        weights.push_back(1.0 + static_cast<double>(m % 4));
        radius += weights[m] * length(v);
        total += weights[m];
      }
      double condition = 0.0;
      const Doubles expected = test::reference_rda(vectors, weights, &condition);
      const double bound = static_cast<double>(count + 8) * 0x1p-24 * radius / total * condition;
      EXPECT_LE(test::distance(merged(vectors, weights, wire), expected), bound) << count;
    }
  }
}

// Norms far outside of what 1/||v|| in f32 can carry.
TEST(RdaMerge, VeryLargeAndVerySmallTensors) {
  for (const float unit : {1e-43f, 1e-38f, 1e-30f, 1e30f, 1e37f}) {
    const Floats got = merged({{3 * unit, 0}, {0, 3 * unit}}, {1, 1});
    const double expected = 3.0 * unit / std::sqrt(2.0);
    EXPECT_NEAR(got[0] / expected, 1.0, unit < 1e-40f ? 0.02 : 1e-6) << unit;
    EXPECT_NEAR(got[1] / expected, 1.0, unit < 1e-40f ? 0.02 : 1e-6) << unit;
  }
}

TEST(RdaMerge, WholeTensorFunctionAgreesWithRunMerge) {
  const std::vector<Floats> vectors = {test::random_floats(9999, 1), test::random_floats(9999, 2)};
  std::vector<test::Bytes> payloads;
  std::vector<SegmentMember> members;
  for (const Floats& v : vectors) payloads.push_back(test::bytes_of(v));
  for (const test::Bytes& payload : payloads) {
    members.push_back({Codec::kF32, payload.data(), 0.5, std::sqrt(kernels::norm_squared(payload.data(), false, 9999, nullptr))});
  }
  Floats out(9999);
  rda_merge(members, 9999, out.data());
  EXPECT_EQ(test::bits_of(out), test::bits_of(merged(vectors, {1, 1})));
}

}  // namespace
}  // namespace diloco
