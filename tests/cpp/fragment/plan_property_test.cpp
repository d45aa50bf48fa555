// Properties of plans over random layouts, and the LPT bound against brute force.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "diloco/base/errors.h"
#include "diloco/fragment/natural_order.h"
#include "diloco/fragment/plan.h"
#include "fragment/layouts.h"

namespace diloco {
namespace {

using Names = std::vector<std::vector<std::string>>;

Names names_of(const Plan& plan, const Layout& layout) {
  Names names;
  for (const Fragment& fragment : plan.fragments) {
    names.emplace_back();
    for (const std::uint32_t tensor : fragment.tensors) names.back().push_back(layout.tensors[tensor].name);
  }
  return names;
}

std::uint64_t largest_fragment(const Plan& plan) {
  std::uint64_t most = 0;
  for (const Fragment& fragment : plan.fragments) most = std::max(most, fragment.numel);
  return most;
}

// Smallest possible largest bin, by trying every assignment.
std::uint64_t best_possible(const std::vector<std::int64_t>& sizes, std::size_t at, std::vector<std::uint64_t>& bins) {
  if (at == sizes.size()) return *std::max_element(bins.begin(), bins.end());
  std::uint64_t best = ~std::uint64_t{0};
  for (std::size_t i = 0; i < bins.size(); ++i) {
    bins[i] += static_cast<std::uint64_t>(sizes[at]);
    best = std::min(best, best_possible(sizes, at + 1, bins));
    bins[i] -= static_cast<std::uint64_t>(sizes[at]);
    if (bins[i] == 0) break;  // further empty bins are alike
  }
  return best;
}

class EveryFragmenter : public testing::TestWithParam<Fragmenter> {};

TEST_P(EveryFragmenter, EveryElementInExactlyOneFragment) {
  std::mt19937_64 engine(1);
  for (int round = 0; round < 300; ++round) {
    const Layout layout = test::random_layout(engine);
    const auto wanted = static_cast<std::uint32_t>(1 + engine() % 30);
    const Plan plan = make_plan(layout, GetParam(), wanted);
    if (GetParam() != Fragmenter::kStrided) {
      ASSERT_EQ(plan.size(), std::min<std::size_t>(wanted, layout.tensors.size()));
    }
    std::vector<int> seen(layout.tensors.size(), 0);
    std::uint64_t total = 0;
    for (const Fragment& fragment : plan.fragments) {
      ASSERT_FALSE(fragment.tensors.empty());
      std::uint64_t numel = 0;
      for (const std::uint32_t tensor : fragment.tensors) {
        ++seen[tensor];
        numel += layout.tensors[tensor].numel();
      }
      ASSERT_EQ(numel, fragment.numel);
      total += numel;
    }
    ASSERT_EQ(total, layout.numel());
    for (const int times : seen) ASSERT_EQ(times, 1);
    ASSERT_NO_THROW(check_plan(plan, layout));
  }
}

TEST_P(EveryFragmenter, OrderOfRegistrationDoesNotMatter) {
  std::mt19937_64 engine(2);
  for (int round = 0; round < 100; ++round) {
    const Layout layout = test::random_layout(engine);
    const Layout other = test::shuffled(layout, engine);
    const auto wanted = static_cast<std::uint32_t>(1 + engine() % 12);
    ASSERT_EQ(names_of(make_plan(layout, GetParam(), wanted), layout), names_of(make_plan(other, GetParam(), wanted), other));
  }
}

TEST_P(EveryFragmenter, TensorsOfAFragmentAreSortedByName) {
  std::mt19937_64 engine(3);
  for (int round = 0; round < 100; ++round) {
    const Layout layout = test::random_layout(engine);
    for (const auto& names : names_of(make_plan(layout, GetParam(), 5), layout)) {
      ASSERT_TRUE(std::is_sorted(names.begin(), names.end()));
    }
  }
}

TEST_P(EveryFragmenter, EveryFragmentHasOneShardAndShardsAreEven) {
  std::mt19937_64 engine(6);
  for (int round = 0; round < 300; ++round) {
    const Layout layout = test::random_layout(engine);
    const auto wanted = static_cast<std::uint32_t>(1 + engine() % 30);
    const Plan whole = make_plan(layout, GetParam(), wanted);
    const auto shards = static_cast<std::uint32_t>(1 + engine() % whole.size());
    const Plan plan = make_plan(layout, GetParam(), wanted, shards);
    ASSERT_EQ(names_of(plan, layout), names_of(whole, layout));  // the fragments do not depend on the shards
    std::vector<std::uint64_t> numel(shards, 0), fragments(shards, 0);
    for (const Fragment& fragment : plan.fragments) {
      ASSERT_LT(fragment.shard, shards);
      numel[fragment.shard] += fragment.numel;
      ++fragments[fragment.shard];
    }
    const std::uint64_t most = *std::max_element(numel.begin(), numel.end());
    ASSERT_LE(most, layout.numel() / shards + largest_fragment(plan));
    ASSERT_GT(*std::min_element(fragments.begin(), fragments.end()), 0u);
    ASSERT_NO_THROW(check_plan(plan, layout, shards));
    ASSERT_THROW(check_plan(plan, layout, shards + 1), ConfigError);
    if (shards > 1) {
      ASSERT_THROW(check_plan(plan, layout, shards - 1), ConfigError);
    }
    const Layout other = test::shuffled(layout, engine);
    ASSERT_EQ(first_difference(plan, layout, make_plan(other, GetParam(), wanted, shards), other), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Plan, EveryFragmenter,
                         testing::Values(Fragmenter::kBalanced, Fragmenter::kLayer, Fragmenter::kStrided,
                                         Fragmenter::kTensor),
                         [](const auto& info) {
                           Settings settings;
                           settings.fragmenter = info.param;
                           return settings.get("fragmenter");
                         });

// Graham: LPT is within 4/3 - 1/(3P) of the best possible split.
TEST(BalancedPlan, WithinGrahamsBoundOfTheBest) {
  std::mt19937_64 engine(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::int64_t> sizes(2 + engine() % 7);
    for (std::int64_t& size : sizes) size = static_cast<std::int64_t>(1 + engine() % 20);
    const auto count = static_cast<std::uint32_t>(1 + engine() % std::min<std::size_t>(4, sizes.size()));
    const Plan plan = make_plan(test::of_sizes(sizes), Fragmenter::kBalanced, count);
    std::vector<std::uint64_t> bins(count, 0);
    const std::uint64_t best = best_possible(sizes, 0, bins);
    ASSERT_LE(3 * count * largest_fragment(plan), (4 * count - 1) * best) << round;
  }
}

TEST(LayerPlan, RunsAreConsecutiveAndNearlyEqual) {
  std::mt19937_64 engine(5);
  for (int round = 0; round < 300; ++round) {
    const Layout layout = test::random_layout(engine);
    const auto wanted = static_cast<std::uint32_t>(1 + engine() % 12);
    const Plan plan = make_plan(layout, Fragmenter::kLayer, wanted);
    std::uint64_t largest_tensor = 0;
    for (const TensorSpec& tensor : layout.tensors) largest_tensor = std::max(largest_tensor, tensor.numel());
    ASSERT_LE(largest_fragment(plan), layout.numel() / plan.size() + largest_tensor + 1);
    Names names = names_of(plan, layout);
    for (std::size_t i = 0; i + 1 < names.size(); ++i) {
      const auto last = *std::max_element(names[i].begin(), names[i].end(), natural_less);
      const auto next = *std::min_element(names[i + 1].begin(), names[i + 1].end(), natural_less);
      ASSERT_TRUE(natural_less(last, next)) << last << " " << next;
    }
  }
}

}  // namespace
}  // namespace diloco
