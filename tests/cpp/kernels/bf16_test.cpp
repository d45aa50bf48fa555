#include <gtest/gtest.h>

#include <cmath>

#include "kernels/arrays.h"

namespace diloco {
namespace {

using test::Bytes;
using test::Floats;

std::uint16_t to_bf16(float value) {
  std::uint16_t bits;
  std::byte out[2];
  kernels::f32_to_bf16(&value, 1, out);
  std::memcpy(&bits, out, 2);
  return bits;
}

// By definition instead of by bit tricks: the nearer of the two bf16 neighbours, the even one of two equally near. The
// neighbour above the largest finite bf16 counts as 2^128, as IEEE 754 has it.
std::uint16_t reference_bf16(float value) {
  const std::uint32_t bits = test::bits(value);
  const auto toward_zero = static_cast<std::uint16_t>(bits >> 16);
  if (std::isinf(value)) return toward_zero;
  const auto magnitude = [](std::uint32_t upper) {
    return upper == 0x7f80u ? std::ldexp(1.0, 128) : static_cast<double>(test::from_bits(upper << 16));
  };
  const std::uint32_t below = toward_zero & 0x7fffu;
  const double low = std::fabs(static_cast<double>(value)) - magnitude(below);
  const double high = magnitude(below + 1) - std::fabs(static_cast<double>(value));
  const bool up = high < low || (high == low && (below & 1u));
  return static_cast<std::uint16_t>(toward_zero + (up ? 1 : 0));
}

// Every upper half with every kind of lower half: rounding looks at the lower half only by how it compares with a half.
TEST(Bf16, RoundsToNearestEvenForEveryUpperHalf) {
  Floats values;
  for (std::uint32_t upper = 0; upper < 0x10000u; ++upper) {
    for (const std::uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(test::from_bits(upper << 16 | lower));
    }
  }
  const Bytes out = test::bf16_bytes_of(values);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint16_t got;
    std::memcpy(&got, out.data() + 2 * i, 2);
    if (std::isnan(values[i])) {
      const bool is_nan = (got & 0x7fffu) > 0x7f80u && (got >> 15) == (test::bits(values[i]) >> 31);
      wrong += is_nan ? 0 : 1;
    } else {
      wrong += got == reference_bf16(values[i]) ? 0 : 1;
    }
  }
  EXPECT_EQ(wrong, 0u);
}

TEST(Bf16, KnownValues) {
  EXPECT_EQ(to_bf16(1.0f), 0x3f80);
  EXPECT_EQ(to_bf16(-0.0f), 0x8000);
  EXPECT_EQ(to_bf16(1.00390625f), 0x3f80);  // 1 + 2^-8: a tie, down to even
  EXPECT_EQ(to_bf16(1.01171875f), 0x3f82);  // 1 + 3 * 2^-8: a tie, up to even
  EXPECT_EQ(to_bf16(3.4e38f), 0x7f80);      // beyond the largest bf16: Inf
  EXPECT_EQ(to_bf16(test::from_bits(0x7f800001u)), 0x7fc0);  // a NaN whose upper half alone would be Inf
  EXPECT_EQ(to_bf16(test::from_bits(0xffffffffu)), 0xffff);  // a NaN that rounding up would make 0
}

TEST(Bf16, EveryValueSurvivesTheRoundTripUnaligned) {
  Bytes all(0x10000u * 2);
  for (std::uint32_t i = 0; i < 0x10000u; ++i) {
    const auto half = static_cast<std::uint16_t>(i);
    std::memcpy(all.data() + 2 * i, &half, 2);
  }
  test::Unaligned in(all);
  Floats wide(0x10000u);
  kernels::bf16_to_f32(in.data(), wide.size(), wide.data());
  test::Unaligned out(Bytes(all.size()));
  kernels::f32_to_bf16(wide.data(), wide.size(), out.data());
  for (std::uint32_t i = 0; i < 0x10000u; ++i) {
    std::uint16_t got;
    std::memcpy(&got, out.data() + 2 * i, 2);
    const bool signalling = (i & 0x7fffu) > 0x7f80u && !(i & 0x40u);
    ASSERT_EQ(got, signalling ? (i | 0x40u) : i);
  }
}

TEST(Bf16, NothingToDo) {
  kernels::f32_to_bf16(nullptr, 0, nullptr);
  kernels::bf16_to_f32(nullptr, 0, nullptr);
}

}  // namespace
}  // namespace diloco
