#include "diloco/fragment/natural_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace diloco {
namespace {

TEST(NaturalOrder, CountsLikePeople) {
  const std::vector<std::string> sorted = {"",      "0",       "1",        "2",        "10",   "a",   "a.0",
                                           "a.00",  "h.1.w",   "h.01.w",   "h.2.b",    "h.2.w", "h.10.b",
                                           "h.10.w", "h.99999999999999999999", "h.100000000000000000000", "h.x", "ln", "wte"};
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    for (std::size_t j = 0; j < sorted.size(); ++j) {
      const bool either = natural_less(sorted[i], sorted[j]) != natural_less(sorted[j], sorted[i]);
      EXPECT_EQ(either, i != j) << sorted[i] << " " << sorted[j];
    }
  }
  EXPECT_TRUE(natural_less("h.2.b", "h.10.b"));
  EXPECT_TRUE(natural_less("h.2", "h.2.w"));
  EXPECT_TRUE(natural_less("h.99999999999999999999", "h.100000000000000000000"));
  EXPECT_TRUE(natural_less("a", "\xc3\xa4"));  // bytes, not signed chars
}

// A total order: sorting any permutation gives the same list.
TEST(NaturalOrder, SortsEveryPermutationAlike) {
  std::vector<std::string> names = {"h.02", "h.2", "h.2a", "h.002", "h.10", "h"};
  std::sort(names.begin(), names.end());
  std::vector<std::string> first = names;
  std::sort(first.begin(), first.end(), [](const auto& a, const auto& b) { return natural_less(a, b); });
  do {
    std::vector<std::string> again = names;
    std::sort(again.begin(), again.end(), [](const auto& a, const auto& b) { return natural_less(a, b); });
    ASSERT_EQ(again, first);
  } while (std::next_permutation(names.begin(), names.end()));
}

}  // namespace
}  // namespace diloco
