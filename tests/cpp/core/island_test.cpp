// The exchange of an island's ranks: numbers whose minimum is the plan.
#include "diloco/core/island.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace diloco {
namespace {

IslandReport report_of(std::vector<Version> ready, std::vector<std::optional<Version>> arrived) {
  return {std::move(ready), std::move(arrived), 0};
}

IslandPlan plan_of(const std::vector<std::vector<std::int64_t>>& ranks) {
  std::vector<std::int64_t> minimum = ranks.front();
  for (const auto& numbers : ranks) {
    EXPECT_EQ(numbers.size(), minimum.size());
    for (std::size_t i = 0; i < minimum.size(); ++i) minimum[i] = std::min(minimum[i], numbers[i]);
  }
  return decode_exchange(minimum, 17);
}

TEST(IslandExchange, GivesTheLeadersOrdersToAll) {
  IslandOrders orders;
  orders.incarnation = 0xfedcba9876543210;
  orders.session = 0x8000000000000001;
  orders.lane_token = 0xffffffffffffffff;
  orders.more = true;
  orders.fragments.resize(2);
  FragmentOrder& first = orders.fragments[0];
  first.stage = true;
  first.adopt = {3, 41};
  first.formula = AdoptFormula::kBlend;
  first.sent_step = 99;
  first.dropped = true;
  first.reset_inner_state = true;
  first.kept = {99, 98, 7, 0};
  orders.fragments[1].back = true;
  const auto leader = encode_exchange(report_of({{3, 41}, {}}, {Version{3, 41}, Version{}}), &orders);
  const auto other = encode_exchange(report_of({{3, 41}, {3, 9}}, {Version{3, 41}, std::nullopt}), nullptr);
  EXPECT_EQ(leader.size(), exchange_length(2));
  const IslandPlan plan = plan_of({leader, other});
  EXPECT_EQ(plan.orders.incarnation, orders.incarnation);
  EXPECT_EQ(plan.orders.session, orders.session);
  EXPECT_EQ(plan.orders.lane_token, orders.lane_token);
  EXPECT_TRUE(plan.orders.more);
  EXPECT_FALSE(plan.orders.failed);
  ASSERT_EQ(plan.orders.fragments.size(), 2u);
  const FragmentOrder& order = plan.orders.fragments[0];
  EXPECT_TRUE(order.stage && order.dropped && order.reset_inner_state);
  EXPECT_FALSE(order.back);
  EXPECT_EQ(order.adopt, first.adopt);
  EXPECT_EQ(order.formula, first.formula);
  EXPECT_EQ(order.sent_step, 99u);
  EXPECT_EQ(order.kept, first.kept);
  EXPECT_TRUE(plan.orders.fragments[1].back);
  EXPECT_EQ(plan.tokens, 17u);
}

TEST(IslandExchange, AdoptionGoesAheadWhenEveryRankHasTheVersion) {
  IslandOrders orders;
  orders.fragments.resize(1);
  orders.fragments[0].adopt = {2, 5};
  const auto go = [&](const Version& mine, const Version& others) {
    return plan_of({encode_exchange(report_of({mine}, {std::nullopt}), &orders),
                    encode_exchange(report_of({others}, {std::nullopt}), nullptr)})
        .go(0);
  };
  EXPECT_TRUE(go({2, 5}, {2, 5}));
  EXPECT_FALSE(go({2, 5}, {2, 4}));
  EXPECT_FALSE(go({2, 5}, {}));
  EXPECT_FALSE(go({2, 5}, {2, 6})) << "after a new session a rank may be ahead";
}

TEST(IslandExchange, ReplicasAreGivenWhatAllConnectedRanksHave) {
  IslandOrders orders;
  orders.fragments.resize(1);
  const auto arrived = [&](std::optional<Version> mine, std::optional<Version> second, std::optional<Version> third) {
    return plan_of({encode_exchange(report_of({{}}, {mine}), &orders), encode_exchange(report_of({{}}, {second}), nullptr),
                    encode_exchange(report_of({{}}, {third}), nullptr)})
        .arrived[0];
  };
  EXPECT_EQ(arrived(Version{1, 2}, std::nullopt, std::nullopt), (Version{1, 2}));
  EXPECT_EQ(arrived(Version{1, 2}, Version{1, 2}, std::nullopt), (Version{1, 2}));
  EXPECT_EQ(arrived(Version{1, 2}, Version{1, 3}, std::nullopt), Version{});
  EXPECT_EQ(arrived(Version{1, 2}, Version{}, std::nullopt), Version{});
}

}  // namespace
}  // namespace diloco
