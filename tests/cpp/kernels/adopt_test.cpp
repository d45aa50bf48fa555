#include <gtest/gtest.h>

#include "kernels/arrays.h"

namespace diloco {
namespace {

using test::Floats;

constexpr std::uint64_t kCount = 1001;

struct Adopt : testing::Test {
  Floats next = test::random_floats(kCount, 1);
  Floats anchor = test::random_floats(kCount, 2);
  Floats local = test::random_floats(kCount, 3);
  const Floats old_anchor = anchor;
  const Floats old_local = local;
};

TEST_F(Adopt, OverwriteTakesTheNewValues) {
  kernels::adopt_overwrite(next.data(), anchor.data(), local.data(), kCount);
  EXPECT_EQ(local, next);
  EXPECT_EQ(anchor, next);
}

TEST_F(Adopt, BlendKeepsAlphaOfLocal) {
  kernels::adopt_blend(next.data(), 0.25f, anchor.data(), local.data(), kCount);
  EXPECT_EQ(anchor, next);
  for (std::uint64_t i = 0; i < kCount; ++i) {
    EXPECT_FLOAT_EQ(local[i], next[i] + 0.25f * (old_local[i] - next[i])) << i;
  }
}

TEST_F(Adopt, BlendWithAlphaZeroOverwrites) {
  kernels::adopt_blend(next.data(), 0.0f, anchor.data(), local.data(), kCount);
  EXPECT_EQ(local, next);
}

TEST_F(Adopt, RebaseCarriesWorkThatWasNotMerged) {
  kernels::adopt_rebase(next.data(), nullptr, anchor.data(), local.data(), kCount);
  EXPECT_EQ(anchor, next);
  for (std::uint64_t i = 0; i < kCount; ++i) EXPECT_EQ(local[i], next[i] - (old_anchor[i] - old_local[i])) << i;
}

TEST_F(Adopt, RebaseTakesOutWhatWasMerged) {
  const Floats sent = test::random_floats(kCount, 4, 0.01f);
  kernels::adopt_rebase(next.data(), sent.data(), anchor.data(), local.data(), kCount);
  EXPECT_EQ(anchor, next);
  for (std::uint64_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(local[i], next[i] - ((old_anchor[i] - old_local[i]) - sent[i])) << i;
  }
}

TEST_F(Adopt, RebaseIsExactWhenAllWorkWasMerged) {
  test::Bytes sent(kCount * 4);
  kernels::fragment_diff_f32(anchor.data(), local.data(), kCount, sent.data());
  const Floats all = test::floats_of(sent);
  kernels::adopt_rebase(next.data(), all.data(), anchor.data(), local.data(), kCount);
  EXPECT_EQ(test::bits_of(local), test::bits_of(next));
}

// Re-adoption: the learner falls back to its own anchor.
TEST_F(Adopt, NextMayBeTheAnchor) {
  kernels::adopt_overwrite(anchor.data(), anchor.data(), local.data(), kCount);
  EXPECT_EQ(local, old_anchor);
  EXPECT_EQ(anchor, old_anchor);
  local = old_local;
  kernels::adopt_rebase(anchor.data(), nullptr, anchor.data(), local.data(), kCount);
  EXPECT_EQ(anchor, old_anchor);
  for (std::uint64_t i = 0; i < kCount; ++i) EXPECT_EQ(local[i], old_anchor[i] - (old_anchor[i] - old_local[i]));
  local = old_local;
  kernels::adopt_blend(anchor.data(), 0.5f, anchor.data(), local.data(), kCount);
  EXPECT_EQ(anchor, old_anchor);
}

TEST(AdoptEmpty, NothingToDo) {
  kernels::adopt_overwrite(nullptr, nullptr, nullptr, 0);
  kernels::adopt_blend(nullptr, 0.5f, nullptr, nullptr, 0);
  kernels::adopt_rebase(nullptr, nullptr, nullptr, nullptr, 0);
}

}  // namespace
}  // namespace diloco
