#include <gtest/gtest.h>

#include "kernels/arrays.h"

namespace diloco {
namespace {

using test::Bytes;
using test::Floats;

TEST(FragmentDiff, IsAnchorMinusLocal) {
  const Floats anchor = {1.0f, 0.0f, -2.0f, 5.0f};
  const Floats local = {0.25f, 1.0f, -2.0f, 7.0f};
  const Floats expected = {0.75f, -1.0f, 0.0f, -2.0f};
  Bytes wide(16), narrow(8);
  kernels::fragment_diff_f32(anchor.data(), local.data(), 4, wide.data());
  kernels::fragment_diff_bf16(anchor.data(), local.data(), 4, narrow.data());
  EXPECT_EQ(test::floats_of(wide), expected);
  EXPECT_EQ(narrow, test::bf16_bytes_of(expected));
}

// bf16 of the difference, never a difference of bf16: the learning signal is far smaller than the parameters.
TEST(FragmentDiff, SmallDifferencesOfLargeValuesSurviveBf16) {
  const float anchor = 100.0f;
  const float local = 99.999f;
  std::byte out[2];
  kernels::fragment_diff_bf16(&anchor, &local, 1, out);
  float back;
  kernels::bf16_to_f32(out, 1, &back);
  EXPECT_NEAR(back, anchor - local, (anchor - local) / 256);
}

TEST(FragmentDiff, OutputMayLieAtAnyAddress) {
  for (const std::uint64_t n : {1, 7, 100, 4097}) {
    const Floats anchor = test::random_floats(n, 1);
    const Floats local = test::random_floats(n, 2);
    Bytes wide(n * 4), narrow(n * 2);
    kernels::fragment_diff_f32(anchor.data(), local.data(), n, wide.data());
    kernels::fragment_diff_bf16(anchor.data(), local.data(), n, narrow.data());
    test::Unaligned wide_odd{Bytes(n * 4)}, narrow_odd{Bytes(n * 2)};
    kernels::fragment_diff_f32(anchor.data(), local.data(), n, wide_odd.data());
    kernels::fragment_diff_bf16(anchor.data(), local.data(), n, narrow_odd.data());
    EXPECT_EQ(std::memcmp(wide_odd.data(), wide.data(), wide.size()), 0);
    EXPECT_EQ(std::memcmp(narrow_odd.data(), narrow.data(), narrow.size()), 0);
  }
}

TEST(FragmentDiff, NothingToDo) {
  kernels::fragment_diff_f32(nullptr, nullptr, 0, nullptr);
  kernels::fragment_diff_bf16(nullptr, nullptr, 0, nullptr);
}

}  // namespace
}  // namespace diloco
