#include "diloco/fragment/plan.h"

#include <gtest/gtest.h>

#include "diloco/base/errors.h"
#include "fragment/layouts.h"

namespace diloco {
namespace {

using test::of_sizes;
using test::tensor;
using Tensors = std::vector<std::uint32_t>;

std::string refusal(const Plan& plan, const Layout& layout) {
  try {
    check_plan(plan, layout);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(BalancedPlan, LongestFirstIntoTheLightest) {
  const Plan plan = make_plan(of_sizes({3, 7, 6, 5, 4}), Fragmenter::kBalanced, 2);
  ASSERT_EQ(plan.size(), 2u);
  EXPECT_EQ(plan.fragments[0].tensors, (Tensors{0, 1, 4}));  // 7, then 4, then 3
  EXPECT_EQ(plan.fragments[1].tensors, (Tensors{2, 3}));     // 6, then 5
  EXPECT_EQ(plan.fragments[0].numel, 14u);
  EXPECT_EQ(plan.fragments[1].numel, 11u);
}

TEST(BalancedPlan, TiesGoByNameThenByLowestBin) {
  const Layout layout = {{tensor("c", {4}), tensor("a", {4}), tensor("b", {4}), tensor("d", {4})}};
  const Plan plan = make_plan(layout, Fragmenter::kBalanced, 2);
  EXPECT_EQ(plan.fragments[0].tensors, (Tensors{1, 0}));  // a, c
  EXPECT_EQ(plan.fragments[1].tensors, (Tensors{2, 3}));  // b, d
}

TEST(BalancedPlan, OneLargeTensorSetsTheFloor) {
  const Plan plan = make_plan(of_sizes({1000, 1, 1, 1}), Fragmenter::kBalanced, 2);
  EXPECT_EQ(plan.fragments[0].tensors, (Tensors{0}));
  EXPECT_EQ(plan.fragments[1].tensors, (Tensors{1, 2, 3}));
}

TEST(LayerPlan, ConsecutiveInNaturalOrder) {
  Layout layout;
  for (const int i : {10, 2, 0, 11, 1, 3}) layout.tensors.push_back(tensor(fmt::format("h.{}", i), {5}));
  const Plan plan = make_plan(layout, Fragmenter::kLayer, 3);
  ASSERT_EQ(plan.size(), 3u);
  EXPECT_EQ(plan.fragments[0].tensors, (Tensors{2, 4}));  // h.0 h.1
  EXPECT_EQ(plan.fragments[1].tensors, (Tensors{1, 5}));  // h.2 h.3
  EXPECT_EQ(plan.fragments[2].tensors, (Tensors{0, 3}));  // h.10 h.11
}

TEST(LayerPlan, CutsNearTheIdealPlaces) {
  const Plan plan = make_plan(of_sizes({1, 1, 1, 9, 1, 1, 1}), Fragmenter::kLayer, 3);
  ASSERT_EQ(plan.size(), 3u);
  EXPECT_EQ(plan.fragments[0].numel, 3u);
  EXPECT_EQ(plan.fragments[1].numel, 9u);
  EXPECT_EQ(plan.fragments[2].numel, 3u);
}

Layout transformer(int layers) {
  Layout layout = {{tensor("wte.weight", {9}), tensor("ln_f.weight", {1})}};
  for (int i = layers - 1; i >= 0; --i) {
    layout.tensors.push_back(tensor(fmt::format("h.{}.attn.weight", i), {4}));
    layout.tensors.push_back(tensor(fmt::format("h.{}.mlp.0.weight", i), {8}));  // a number inside a layer
  }
  return layout;
}

std::vector<std::string> names(const Plan& plan, const Layout& layout, std::size_t fragment) {
  std::vector<std::string> out;
  for (const auto index : plan.fragments[fragment].tensors) out.push_back(layout.tensors[index].name);
  return out;
}

TEST(StridedPlan, DealsLayersOutInTurn) {
  const Layout layout = transformer(4);  // layers in natural order: h.0 h.1 h.2 h.3 ln_f wte
  const Plan plan = make_plan(layout, Fragmenter::kStrided, 3);
  ASSERT_EQ(plan.size(), 3u);
  EXPECT_EQ(names(plan, layout, 0), (std::vector<std::string>{"h.0.attn.weight", "h.0.mlp.0.weight", "h.3.attn.weight",
                                                              "h.3.mlp.0.weight"}));
  EXPECT_EQ(names(plan, layout, 1), (std::vector<std::string>{"h.1.attn.weight", "h.1.mlp.0.weight", "ln_f.weight"}));
  EXPECT_EQ(names(plan, layout, 2), (std::vector<std::string>{"h.2.attn.weight", "h.2.mlp.0.weight", "wte.weight"}));
}

TEST(StridedPlan, AtMostOneFragmentPerLayer) {
  const Layout layout = transformer(11);
  const Plan plan = make_plan(layout, Fragmenter::kStrided, 24);
  EXPECT_EQ(plan.size(), 13u);
  EXPECT_EQ(names(plan, layout, 10)[0], "h.10.attn.weight");  // natural order
}

TEST(TensorPlan, DealsTensorsOutInTurn) {
  const Layout layout = transformer(2);
  const Plan plan = make_plan(layout, Fragmenter::kTensor, 2);
  EXPECT_EQ(names(plan, layout, 0), (std::vector<std::string>{"h.0.attn.weight", "h.1.attn.weight", "ln_f.weight"}));
  EXPECT_EQ(names(plan, layout, 1), (std::vector<std::string>{"h.0.mlp.0.weight", "h.1.mlp.0.weight", "wte.weight"}));
}

constexpr Fragmenter kAll[] = {Fragmenter::kBalanced, Fragmenter::kLayer, Fragmenter::kStrided, Fragmenter::kTensor};

TEST(Plan, AtMostOneFragmentPerTensorAndNoneEmpty) {
  for (const Fragmenter fragmenter : kAll) {
    for (const Layout& layout : {of_sizes({5, 0, 0, 0}), of_sizes({0, 0, 0}), of_sizes({1}), of_sizes({0, 9, 0, 9, 0})}) {
      const Plan plan = make_plan(layout, fragmenter, 24);
      EXPECT_EQ(plan.size(), layout.tensors.size());
      for (const Fragment& fragment : plan.fragments) EXPECT_EQ(fragment.tensors.size(), 1u);
    }
  }
}

TEST(Plan, EmptyTensorsFillFragmentsThatWouldHaveNone) {
  const Plan plan = make_plan(of_sizes({5, 0, 0, 0}), Fragmenter::kBalanced, 3);
  for (const Fragment& fragment : plan.fragments) EXPECT_FALSE(fragment.tensors.empty());
}

TEST(Plan, OneFragmentHoldsAllSortedByName) {
  const Layout layout = {{tensor("b", {2}), tensor("a", {9}), tensor("c", {})}};
  for (const Fragmenter fragmenter : kAll) {
    const Plan plan = make_plan(layout, fragmenter, 1);
    ASSERT_EQ(plan.size(), 1u);
    EXPECT_EQ(plan.fragments[0].tensors, (Tensors{1, 0, 2}));
    EXPECT_EQ(plan.fragments[0].numel, 12u);
    EXPECT_EQ(plan.fragments[0].shard, 0u);
  }
}

// Longest first to the lightest: 9, 7 and 7 to one each, 2 to the first with 7, the empty one to the other with 7.
TEST(Plan, FragmentsGoToTheLightestShard) {
  const Plan plan = make_plan(of_sizes({2, 7, 9, 7, 0}), Fragmenter::kTensor, 5, 3);
  std::vector<std::uint32_t> shards;
  for (const Fragment& fragment : plan.fragments) shards.push_back(fragment.shard);
  EXPECT_EQ(shards, (std::vector<std::uint32_t>{1, 1, 0, 2, 2}));
  const Layout empty = of_sizes({0, 0, 0});  // no shard without a fragment, however little there is to share
  EXPECT_NO_THROW(check_plan(make_plan(empty, Fragmenter::kTensor, 3, 3), empty, 3));
}

TEST(Plan, NoMoreShardsThanFragments) {
  EXPECT_THROW(make_plan(of_sizes({1, 2}), Fragmenter::kBalanced, 2, 0), ConfigError);
  EXPECT_THROW(make_plan(of_sizes({1, 2}), Fragmenter::kBalanced, 4, 3), ConfigError);
}

TEST(Plan, TheFirstDifferenceNamesBothSides) {
  const Layout layout = of_sizes({5, 4, 3, 2});
  const auto difference = [&](const Plan& other) {
    return first_difference(make_plan(layout, Fragmenter::kBalanced, 2, 2), layout, other, layout);
  };
  EXPECT_EQ(difference(make_plan(layout, Fragmenter::kBalanced, 2, 2)), "");
  EXPECT_EQ(difference(make_plan(layout, Fragmenter::kBalanced, 3, 2)), "2 fragments and 3");
  EXPECT_EQ(difference(make_plan(layout, Fragmenter::kBalanced, 2, 1)), "fragment 1 of shard 1 and of shard 0");
  EXPECT_EQ(difference(make_plan(layout, Fragmenter::kTensor, 2, 2)), "'t3' in fragment 0 and 't2'");
}

TEST(Plan, MoreThan2To31Elements) {
  const std::int64_t huge = (std::int64_t{1} << 31) + 8;
  for (const Fragmenter fragmenter : kAll) {
    const Plan plan = make_plan(of_sizes({huge, huge, huge, 1 << 20}), fragmenter, 2);
    EXPECT_EQ(plan.fragments[0].numel + plan.fragments[1].numel, 3 * static_cast<std::uint64_t>(huge) + (1 << 20));
  }
}

// The largest layout allowed, and as many fragments as the type holds: cuts are computed without overflow.
TEST(Plan, TheLargestLayout) {
  const std::int64_t quarter = std::int64_t{1} << 60;
  const Plan plan = make_plan(of_sizes({quarter, quarter, quarter, quarter}), Fragmenter::kLayer, 0xffffffffu);
  ASSERT_EQ(plan.size(), 4u);
  for (const Fragment& fragment : plan.fragments) EXPECT_EQ(fragment.numel, static_cast<std::uint64_t>(quarter));
}

TEST(Plan, RefusesZeroFragmentsAndBadLayouts) {
  EXPECT_THROW(make_plan(of_sizes({1}), Fragmenter::kBalanced, 0), ConfigError);
  EXPECT_THROW(make_plan({}, Fragmenter::kBalanced, 1), ConfigError);
  EXPECT_THROW(make_plan({{tensor("a", {-3})}}, Fragmenter::kLayer, 1), ConfigError);
}

TEST(GrowPlan, WhatIsThereStaysAndTheRestGetsFragmentsOfItsSize) {
  Layout layout = of_sizes({8, 7, 6, 5});
  const Plan before = make_plan(layout, Fragmenter::kBalanced, 2);  // 13 elements each
  for (const std::int64_t size : {9, 9, 9, 9}) {
    layout.tensors.push_back(tensor(fmt::format("new.{}", layout.tensors.size()), {size}));
  }
  const Plan grown = grow_plan(before, layout, Fragmenter::kBalanced);
  ASSERT_EQ(grown.size(), 5u);  // 36 elements: three fragments of at most 13, as far as tensors allow
  EXPECT_EQ(grown.fragments[0], before.fragments[0]);
  EXPECT_EQ(grown.fragments[1], before.fragments[1]);
  EXPECT_EQ(refusal(grown, layout), "");
  EXPECT_EQ(first_of(grown, 2), before);
  EXPECT_EQ(first_of(grown, 5), grown);
  // The schedule of what is there stays, too; what is added follows it.
  EXPECT_EQ(grown.cycle(), before.cycle());
  layout.tensors.push_back(tensor("tail", {}));
  const Plan again = grow_plan(grown, layout, Fragmenter::kBalanced);
  EXPECT_EQ(again.size(), 6u);
  EXPECT_EQ(again.cycle(), before.cycle());
  EXPECT_EQ(first_of(again, 5), grown);
}

TEST(CheckPlan, FindsWhatIsWrong) {
  const Layout layout = of_sizes({4, 2});
  EXPECT_EQ(refusal({{{{0}, 4, 0}, {{1}, 2, 0}}}, layout), "");
  EXPECT_NE(refusal({{{{0}, 4, 0}}}, layout).find("'t1' is in no fragment"), std::string::npos);
  EXPECT_NE(refusal({}, layout).find("'t0' is in no fragment"), std::string::npos);
  EXPECT_NE(refusal({{{{0, 1}, 6, 0}, {{1}, 2, 0}}}, layout).find("'t1' is in more than one place"), std::string::npos);
  EXPECT_NE(refusal({{{{0, 0}, 8, 0}, {{1}, 2, 0}}}, layout).find("'t0' is in more than one place"), std::string::npos);
  EXPECT_NE(refusal({{{{0, 7}, 4, 0}, {{1}, 2, 0}}}, layout).find("names tensor 7"), std::string::npos);
  EXPECT_NE(refusal({{{{0}, 5, 0}, {{1}, 2, 0}}}, layout).find("has 5 elements, its tensors have 4"), std::string::npos);
}

}  // namespace
}  // namespace diloco
