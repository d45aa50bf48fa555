#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "merge/jobs.h"

namespace diloco {
namespace {

using test::Floats;
using test::tensor;

const Layout& two_tensors() {
  static const Layout layout = {{tensor("a", {2, 2}), tensor("b", {3}), tensor("c", {0, 4})}};
  return layout;
}

struct Screen : ::testing::TestWithParam<WireDtype> {
  test::JobBuilder builder{two_tensors(), Floats(7), {}, GetParam()};

  ScreenResult of(const Floats& dense) {
    test::Bytes payload(builder.job.in.bytes);
    encode_payload(builder.job.in, dense.data(), payload.data());
    test::Unaligned odd(payload);
    return screen(builder.job.in, odd.data());
  }
};

TEST_P(Screen, NormsPerTensor) {
  const ScreenResult result = of({3, 0, 0, 4, 1, 2, 2});
  EXPECT_TRUE(result.finite);
  EXPECT_EQ(result.norms, (std::vector<double>{5.0, 3.0, 0.0}));
}

TEST_P(Screen, OneBadValueInAnyTensor) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (std::size_t at = 0; at < 7; ++at) {
      Floats dense(7, 1.0f);
      dense[at] = bad;
      EXPECT_FALSE(of(dense).finite) << bad << " at " << at;
    }
  }
}

TEST_P(Screen, HugeValuesAreFinite) {
  const ScreenResult result = of(Floats(7, 1e38f));
  EXPECT_TRUE(result.finite);
  EXPECT_NEAR(result.norms[0], 2e38, 1e36);
}

INSTANTIATE_TEST_SUITE_P(Merge, Screen, ::testing::Values(WireDtype::kF32, WireDtype::kBf16),
                         [](const auto& info) { return info.param == WireDtype::kF32 ? "f32" : "bf16"; });

}  // namespace
}  // namespace diloco
