#include "diloco/core/memory_budget.h"

#include <gtest/gtest.h>

namespace diloco {
namespace {

// Two fragments of 1024 x 1024 in f32.
struct MemoryBudget : ::testing::Test {
  MemoryBudget() {
    layout.tensors = {{"a", {1024, 1024}, Dtype::kF32, {}}, {"b", {1024, 1024}, Dtype::kF32, {}}};
    settings.num_fragments = 2;
  }
  Plan plan() const { return make_plan(layout, settings.fragmenter, settings.num_fragments); }
  Layout layout;
  Settings settings;
  static constexpr std::uint64_t kMiB = 1 << 20;
};

TEST_F(MemoryBudget, OfALearnerIsTheDocumentedTable) {
  const auto bf16 = learner_budget(layout, plan(), settings, 0);
  EXPECT_EQ(bf16.anchors, 8 * kMiB);
  EXPECT_EQ(bf16.copies, 3 * 4 * kMiB);       // b = 2 bytes
  EXPECT_EQ(bf16.copies_most, 6 * 4 * kMiB);
  EXPECT_EQ(bf16.arriving, 12 * kMiB);        // f32 down, the largest twice
  EXPECT_EQ(bf16.scratch, 8 * kMiB);
  EXPECT_EQ(bf16.wire, settings.credit_window_bytes);
  EXPECT_EQ(bf16.most(), bf16.anchors + bf16.copies_most + bf16.arriving + bf16.scratch + bf16.wire);
  settings.wire_dtype = WireDtype::kF32;
  const auto f32 = learner_budget(layout, plan(), settings, 0);
  EXPECT_EQ(f32.copies, 3 * 8 * kMiB);
  EXPECT_EQ(f32.scratch, 0u);
}

TEST_F(MemoryBudget, StagingBytesBoundTheCopies) {
  EXPECT_EQ(learner_budget(layout, plan(), settings, 5 * kMiB).copies, 5 * kMiB);
  EXPECT_EQ(learner_budget(layout, plan(), settings, 5 * kMiB).copies_most, 5 * kMiB);
  EXPECT_EQ(learner_budget(layout, plan(), settings, 1 << 30).copies, 12 * kMiB);
}

TEST_F(MemoryBudget, OfTheSyncerGrowsWithOuterStateQuorumAndLearners) {
  const auto sgd = syncer_budget(layout, plan(), settings, 3);
  EXPECT_EQ(sgd.weights, 16 * kMiB);  // theta and image
  EXPECT_EQ(sgd.merging, 8 * kMiB);
  EXPECT_EQ(sgd.least, 2 * kMiB);
  EXPECT_EQ(sgd.comfortable, (2 * 3 * 4 + 2) * kMiB);
  EXPECT_EQ(sgd.retained, 0u);
  settings.outer_optimizer = OuterKind::kAdam;
  settings.outer_momentum = 0.9;
  settings.min_quorum = 2;
  settings.anchor = Anchor::kSyncer;
  const auto adam = syncer_budget(layout, plan(), settings, 3);
  EXPECT_EQ(adam.weights, 32 * kMiB);
  EXPECT_EQ(adam.least, 4 * kMiB);
  EXPECT_EQ(adam.retained, settings.staleness_limit() * 8 * kMiB);
  settings.mode = Mode::kLockstep;
  EXPECT_EQ(syncer_budget(layout, plan(), settings, 3).least, 6 * kMiB);
}

}  // namespace
}  // namespace diloco
