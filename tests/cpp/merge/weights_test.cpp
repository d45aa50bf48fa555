#include <gtest/gtest.h>

#include <limits>

#include "diloco/base/errors.h"
#include "merge/jobs.h"

namespace diloco {
namespace {

using test::tensor;

double plain(Weights kind, std::uint64_t tokens, std::uint64_t steps) {
  return contribution_weight(kind, tokens, steps, 0.0, 0);
}

TEST(Weights, TokensSquaredPerStep) {
  EXPECT_EQ(plain(Weights::kTokensPerStep, 1000, 10), 100000.0);
  // Equal batch: as the steps. Equal steps: as the square of the batch.
  EXPECT_DOUBLE_EQ(plain(Weights::kTokensPerStep, 30 * 64, 30) / plain(Weights::kTokensPerStep, 10 * 64, 10), 3.0);
  EXPECT_DOUBLE_EQ(plain(Weights::kTokensPerStep, 10 * 64, 10) / plain(Weights::kTokensPerStep, 10 * 32, 10), 4.0);
}

TEST(Weights, TokensAndEqual) {
  EXPECT_EQ(plain(Weights::kTokens, 1000, 7), 1000.0);
  EXPECT_EQ(plain(Weights::kEqual, 1000, 7), 1.0);
}

TEST(Weights, NoStepsNoWeight) {
  for (const Weights kind : {Weights::kTokensPerStep, Weights::kTokens, Weights::kEqual}) {
    EXPECT_EQ(plain(kind, 0, 0), 0.0);
    EXPECT_EQ(plain(kind, 1000, 0), 0.0);
  }
  EXPECT_EQ(plain(Weights::kTokensPerStep, 0, 5), 0.0);
}

TEST(Weights, StalenessDiscount) {
  EXPECT_DOUBLE_EQ(contribution_weight(Weights::kTokens, 100, 1, 0.25, 2), 100.0 / 1.5);
  EXPECT_EQ(contribution_weight(Weights::kTokens, 100, 1, 0.25, 0), 100.0);
  EXPECT_EQ(contribution_weight(Weights::kTokens, 100, 1, 0.0, 1000), 100.0);
}

TEST(Weights, TheLargestCountsStayFinite) {
  const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  EXPECT_GT(plain(Weights::kTokensPerStep, most, 1), 0.0);
  EXPECT_TRUE(std::isfinite(256 * plain(Weights::kTokensPerStep, most, 1)));
}

std::vector<bool> choice(const Layout& layout, Settings settings) {
  const Plan plan = make_plan(layout, Fragmenter::kBalanced, 1);
  return rda_segments(layout, payload_layout(layout, plan, 0, PayloadKind::kContribution, settings), settings);
}

TEST(RdaSegments, MatricesButNotEmbeddingsHeadsAndVectors) {
  const Layout layout = {{tensor("a.attn.weight", {4, 4}), tensor("b.attn.bias", {4}), tensor("lm_head.weight", {8, 4}),
                          tensor("scale", {}), tensor("tok_embeddings.weight", {8, 4}), tensor("transformer.wte.weight", {8, 4}),
                          tensor("v.conv.weight", {2, 2, 3})}};
  EXPECT_EQ(choice(layout, {}), (std::vector<bool>{true, false, false, false, false, false, true}));
}

TEST(RdaSegments, ATiedHeadIsAnEmbeddingUnderAnyName) {
  const Layout layout = {{tensor("a.weight", {8, 4}, Dtype::kF32, {"x.embed.weight"}), tensor("b.weight", {8, 4})}};
  EXPECT_EQ(choice(layout, {}), (std::vector<bool>{false, true}));
}

TEST(RdaSegments, SettingsDecide) {
  const Layout layout = {{tensor("embed", {8, 4}), tensor("w", {8, 4})}};
  Settings settings;
  settings.merge = MergeKind::kMean;
  EXPECT_EQ(choice(layout, settings), (std::vector<bool>{false, false}));
  settings.merge = MergeKind::kRda;
  settings.merge_overrides = "";
  EXPECT_EQ(choice(layout, settings), (std::vector<bool>{true, true}));
  settings.merge_overrides = "^w$=mean";
  EXPECT_EQ(choice(layout, settings), (std::vector<bool>{true, false}));
  settings.merge_overrides = "^w$=rda;w=mean;embed=mean";  // the first that matches
  EXPECT_EQ(choice(layout, settings), (std::vector<bool>{false, true}));
  settings.merge = MergeKind::kMean;
  EXPECT_EQ(choice(layout, settings), (std::vector<bool>{false, true}));
  settings.merge_overrides = "(=mean";
  EXPECT_THROW(choice(layout, settings), ConfigError);
}

TEST(RdaSegments, AnOverrideHoldsForVectorsToo) {
  const Layout layout = {{tensor("a.bias", {8}), tensor("b.bias", {8})}};
  Settings settings;
  settings.merge_overrides = "^a=rda";
  EXPECT_EQ(choice(layout, settings), (std::vector<bool>{true, false}));
}

}  // namespace
}  // namespace diloco
