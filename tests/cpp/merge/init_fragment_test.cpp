#include "diloco/merge/init_fragment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "merge/jobs.h"

namespace diloco {
namespace {

using test::Floats;
using test::tensor;

InitJob job_of(const Layout& layout, const Floats& anchor, WireDtype downlink, OuterKind outer) {
  Settings settings;
  settings.downlink_dtype = downlink;
  const Plan plan = make_plan(layout, Fragmenter::kBalanced, 1);
  InitJob job;
  job.in = payload_layout(layout, plan, 0, PayloadKind::kAnchor, settings);
  job.out = payload_layout(layout, plan, 0, PayloadKind::kImage, settings);
  job.outer.kind = outer;
  BufferPtr payload = Buffer::make(job.in.bytes);
  encode_payload(job.in, anchor.data(), payload->data());
  job.payload = payload;
  job.version = {3, 1};
  return job;
}

const Layout& started_model() {
  static const Layout layout = {{tensor("a", {2, 2}, Dtype::kBf16), tensor("b", {3})}};
  return layout;
}

TEST(InitFragment, BuffersThatHaveBeenUsedLeaveNothingBehind) {
  const InitJob job = job_of(started_model(), test::random_floats(7, 1), WireDtype::kParam, OuterKind::kAdam);
  const InitResult fresh = run_init(job);
  BufferPool pool(1 << 20);
  for (const std::uint64_t bytes : {std::uint64_t{28}, std::uint64_t{56}, job.out.bytes}) {
    const BufferPtr used = pool.make(bytes);
    std::fill_n(used->data(), used->size(), std::byte{0xff});
  }
  const InitResult again = run_init(job, pool);
  EXPECT_EQ(pool.idle_bytes(), 0u);
  EXPECT_EQ(test::bits_of(test::floats_of(*again.state->theta)), test::bits_of(test::floats_of(*fresh.state->theta)));
  EXPECT_EQ(test::floats_of(*again.state->outer_state), Floats(14, 0.0f));
  EXPECT_EQ(again.image.checksums, fresh.image.checksums);
}

TEST(InitFragment, ThetaIsTheAnchorAndTheOuterStateZero) {
  const Floats anchor = {1, 2, 3, 4, 0.1f, -0.0f, 1e-40f};
  const InitResult result = run_init(job_of(started_model(), anchor, WireDtype::kParam, OuterKind::kNesterov));
  ASSERT_TRUE(result.finite);
  EXPECT_EQ(result.state->version, (Version{3, 1}));
  EXPECT_EQ(test::bits_of(test::floats_of(*result.state->theta)), test::bits_of(anchor));
  EXPECT_EQ(test::floats_of(*result.state->outer_state), Floats(7, 0.0f));
  EXPECT_EQ(result.image.bytes->size(), 64u + 12);
  EXPECT_EQ(result.image.checksums.size(), 1u);
}

TEST(InitFragment, SgdHasNoOuterState) {
  EXPECT_EQ(run_init(job_of(started_model(), Floats(7), WireDtype::kF32, OuterKind::kSgd)).state->outer_state, nullptr);
}

TEST(InitFragment, RefusesWhatIsNotFiniteHereOrInTheImage) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 3.4e38f}) {
    const InitResult result = run_init(job_of(started_model(), Floats(7, bad), WireDtype::kBf16, OuterKind::kSgd));
    EXPECT_FALSE(result.finite);
    EXPECT_EQ(result.state, nullptr);
    EXPECT_EQ(result.image.bytes, nullptr);
  }
}

}  // namespace
}  // namespace diloco
