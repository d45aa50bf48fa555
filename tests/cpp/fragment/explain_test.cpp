#include "diloco/fragment/explain.h"

#include <gtest/gtest.h>

#include "diloco/base/errors.h"
#include "fragment/layouts.h"

namespace diloco {
namespace {

using test::tensor;

Settings settings_of(std::map<std::string, std::string> given) {
  Settings settings;
  for (const auto& [name, value] : given) settings.set(name, value);
  return settings;
}

TEST(Explain, SaysWhatTravelsWhen) {
  const Layout layout = {{tensor("a", {8, 8}), tensor("b", {4, 16}, Dtype::kBf16), tensor("c", {64})}};
  const auto settings = settings_of({{"sync_every", "9"}, {"num_fragments", "3"}});
  const PlanExplained plan = explain(layout, settings);
  ASSERT_EQ(plan.fragments.size(), 3u);
  EXPECT_EQ(plan.numel, 192u);
  EXPECT_TRUE(plan.oversized.empty());
  const std::vector<std::uint64_t> up = {128, 128, 256}, down = {256, 128, 256};
  const std::vector<Clock> due = {3, 6, 9};
  const std::vector<std::string> names = {"a", "b", "c"};
  for (FragmentId p = 0; p < 3; ++p) {
    EXPECT_EQ(plan.fragments[p].tensors, std::vector<std::string>{names[p]});
    EXPECT_EQ(plan.fragments[p].numel, 64u);
    EXPECT_EQ(plan.fragments[p].up_bytes, up[p]);
    EXPECT_EQ(plan.fragments[p].down_bytes, down[p]);
    EXPECT_EQ(plan.fragments[p].due, due[p]);
  }
  EXPECT_EQ(plan.peak_up_bytes, 256u);
  EXPECT_DOUBLE_EQ(plan.ideal_peak_up_bytes, 512.0 / 3);
  const std::string text = to_text(plan, settings);
  EXPECT_NE(text.find("peak: 256 B become due in one step, 1.50 times"), std::string::npos) << text;
}

// Two fragments fall due in the same step where there are more fragments than steps.
TEST(Explain, CountsWhatFallsDueTogether) {
  const auto settings = settings_of({{"sync_every", "3"}, {"num_fragments", "6"}});
  const PlanExplained plan = explain(test::of_sizes({16, 16, 16, 16, 16, 16}), settings);
  EXPECT_EQ(plan.peak_up_bytes, 128u);
  EXPECT_DOUBLE_EQ(plan.ideal_peak_up_bytes, 128.0);
}

TEST(Explain, LockstepSaysTheAdoptionStep) {
  const auto settings = settings_of({{"preset", "streaming"}, {"num_fragments", "2"}, {"sync_every", "100"}});
  const PlanExplained plan = explain({{tensor("h.0.w", {4}), tensor("h.1.w", {4})}}, settings);
  EXPECT_EQ(plan.fragments[0].due, 100u);  // Streaming DiLoCo's own example
  EXPECT_EQ(plan.fragments[1].due, 150u);
}

TEST(Explain, ReportsATensorLargerThanItsShare) {
  const auto settings = settings_of({{"num_fragments", "4"}});
  const PlanExplained plan = explain({{tensor("embed", {100}), tensor("a", {10}), tensor("b", {10}), tensor("c", {10})}}, settings);
  EXPECT_EQ(plan.oversized, std::vector<std::string>{"embed"});
  EXPECT_NE(to_text(plan, settings).find("larger than an equal share of the model: embed"), std::string::npos);
}

TEST(Explain, SaysThatThereAreFewerTensorsThanFragments) {
  const auto settings = settings_of({{"num_fragments", "24"}});
  EXPECT_NE(to_text(explain(test::of_sizes({3, 4}), settings), settings).find("24 was asked for; there are 2 tensors"),
            std::string::npos);
}

// A trillion elements by their layout alone.
TEST(Explain, HugeLayoutsDoNotOverflow) {
  const auto settings = settings_of({{"num_fragments", "2"}});
  const PlanExplained plan = explain({{tensor("a", {1 << 20, 1 << 20}), tensor("b", {1 << 20, 1 << 20})}}, settings);
  EXPECT_EQ(plan.fragments[0].up_bytes, std::uint64_t{1} << 41);
  EXPECT_EQ(plan.peak_up_bytes, std::uint64_t{1} << 41);
}

TEST(Explain, RefusesWhatTheSyncerWouldRefuse) {
  EXPECT_THROW(explain({}, {}), ConfigError);
  EXPECT_THROW(explain(test::of_sizes({3}), settings_of({{"sync_every", "2"}})), ConfigError);
}

}  // namespace
}  // namespace diloco
