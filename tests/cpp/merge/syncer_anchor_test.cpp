// anchor = syncer: the outer gradient of a learner that is behind is taken against the newest theta.
#include "diloco/base/errors.h"
#include "merge/jobs.h"

namespace diloco {
namespace {

using test::Floats;
using test::tensor;

const Layout kLayout = {{tensor("w", {2, 2}), tensor("b", {3})}};
const Floats kNow = {1, 2, 3, 4, 5, 6, 7};
const Floats kBase = {1.5f, 2, 2, 4.25f, 5, 5, 7.5f};
const Floats kWork = {0.25f, -0.5f, 1, 2, -1, 0.5f, 0};  // base - local

Floats local_values() {
  Floats local(7);
  for (std::size_t i = 0; i < 7; ++i) local[i] = kBase[i] - kWork[i];
  return local;
}

// Decoupled DiLoCo, App. D.2: Delta = Theta_now - theta_local. So SGD with lr 1 lands on a single learner's weights.
TEST(SyncerAnchor, IsTheNewestThetaMinusTheLearnersWeights) {
  for (const WireDtype wire : {WireDtype::kF32, WireDtype::kBf16}) {
    test::JobBuilder builder(kLayout, kNow, {}, wire);
    builder.add(kWork, 1.0, "late", kBase);
    const MergeResult result = run_merge(builder.job);
    ASSERT_TRUE(result.ok);
    EXPECT_EQ(test::floats_of(*result.next->theta), local_values());
  }
}

TEST(SyncerAnchor, WithoutABaseTheContributionCountsAsItCame) {
  test::JobBuilder builder(kLayout, kNow);
  builder.add(kWork, 1.0);
  Floats expected(7);
  for (std::size_t i = 0; i < 7; ++i) expected[i] = kNow[i] - kWork[i];
  EXPECT_EQ(test::floats_of(*run_merge(builder.job).next->theta), expected);
}

// The learner's local weights follow from what it was sent, rounded as it was.
TEST(SyncerAnchor, TheBaseIsTheImageThatWasSent) {
  const Floats base = {1, 2, 2, 4.004f, 5.005f, 5.006f, 7.007f};  // b, then w: no bf16 values
  test::JobBuilder builder({{tensor("w", {2, 2}, Dtype::kBf16), tensor("b", {3})}}, kNow, {}, WireDtype::kF32,
                           WireDtype::kParam);
  builder.add(kWork, 1.0, "late", base);
  const Floats next = test::floats_of(*run_merge(builder.job).next->theta);
  for (std::size_t i = 3; i < 7; ++i) {
    float rounded = 0.0f;
    std::byte wire[2];
    encode(Codec::kBf16, &base[i], 1, wire);
    decode(Codec::kBf16, wire, 1, &rounded);
    EXPECT_FLOAT_EQ(next[i], rounded - kWork[i]) << i;
  }
}

// Fresh and late members together, RDA on matrices: the same as a job in which the late one was shifted beforehand.
TEST(SyncerAnchor, NormsAreThoseOfTheShiftedDisplacement) {
  Floats shifted(7);
  for (std::size_t i = 0; i < 7; ++i) shifted[i] = kWork[i] + (kNow[i] - kBase[i]);
  const Floats fresh = {0.5f, 0.25f, -1, 0.125f, 1, 2, 3};
  test::JobBuilder late(kLayout, kNow), beforehand(kLayout, kNow);
  late.add(fresh, 3.0, "a").add(kWork, 1.0, "b", kBase);
  beforehand.add(fresh, 3.0, "a").add(shifted, 1.0, "b");
  EXPECT_EQ(test::floats_of(*run_merge(late.job).next->theta), test::floats_of(*run_merge(beforehand.job).next->theta));
}

TEST(SyncerAnchor, ABaseOfTheWrongSizeIsRefused) {
  test::JobBuilder builder(kLayout, kNow);
  builder.add(kWork, 1.0);
  builder.job.members[0].base_image = Buffer::make(8);
  EXPECT_THROW(run_merge(builder.job), ConfigError);
}

}  // namespace
}  // namespace diloco
