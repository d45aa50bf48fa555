#include <gtest/gtest.h>

#include "diloco/base/settings.h"

namespace diloco {
namespace {

TEST(Suggest, FindsTheNearestName) {
  const std::vector<std::string> known = {"sync_every", "num_fragments", "outer_momentum", "grace_s"};
  EXPECT_EQ(suggest("sync_evry", known), "sync_every");
  EXPECT_EQ(suggest("snyc_every", known), "sync_every");
  EXPECT_EQ(suggest("SYNC-EVERY", known), "sync_every");
  EXPECT_EQ(suggest("grace", known), "grace_s");
  EXPECT_EQ(suggest("momentum", known), "outer_momentum");
}

TEST(Suggest, SaysNothingRatherThanNonsense) {
  const std::vector<std::string> known = {"sync_every", "num_fragments"};
  EXPECT_EQ(suggest("zebra", known), "");
  EXPECT_EQ(suggest("", known), "");
  EXPECT_EQ(suggest("x", known), "");
  EXPECT_EQ(suggest(std::string(100000, 's'), known), "");
  EXPECT_EQ(suggest("sync_every", {}), "");
}

}  // namespace
}  // namespace diloco
