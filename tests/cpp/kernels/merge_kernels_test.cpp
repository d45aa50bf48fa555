#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/arrays.h"

namespace diloco {
namespace {

using test::Bytes;
using test::Floats;

const float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMax = std::numeric_limits<float>::max();

std::vector<std::uint64_t> awkward_sizes() { return {0, 1, 2, 15, 16, 17, 31, 33, 100, 4095, 4096, 4097, 8192, 10001}; }

TEST(NormSquared, AgreesWithLongDouble) {
  for (const std::uint64_t n : awkward_sizes()) {
    const Floats values = test::random_floats(n, n);
    long double expected = 0;
    for (const float value : values) expected += static_cast<long double>(value) * value;
    const auto reference = static_cast<double>(expected);
    EXPECT_NEAR(kernels::norm_squared_f32(values.data(), n), reference, 1e-13 * reference) << n;
    const Bytes narrow = test::bf16_bytes_of(values);
    Floats back(n);
    kernels::bf16_to_f32(narrow.data(), n, back.data());
    EXPECT_EQ(kernels::norm_squared(narrow.data(), true, n, nullptr), kernels::norm_squared_f32(back.data(), n)) << n;
  }
}

TEST(NormSquared, BlocksAddUpToTheWhole) {
  const Floats values = test::random_floats(3 * kernels::kBlock + 77, 5);
  double sum = 0.0;
  for (std::uint64_t at = 0; at < values.size(); at += kernels::kBlock) {
    sum += kernels::norm_squared_f32(values.data() + at, std::min<std::uint64_t>(kernels::kBlock, values.size() - at));
  }
  EXPECT_EQ(sum, kernels::norm_squared_f32(values.data(), values.size()));
}

TEST(NormSquared, AddressDoesNotMatter) {
  for (const std::uint64_t n : awkward_sizes()) {
    const Floats values = test::random_floats(n, n);
    test::Unaligned wide(test::bytes_of(values));
    test::Unaligned narrow(test::bf16_bytes_of(values));
    EXPECT_EQ(kernels::norm_squared(wide.data(), false, n, nullptr), kernels::norm_squared_f32(values.data(), n));
    EXPECT_EQ(kernels::norm_squared(narrow.data(), true, n, nullptr),
              kernels::norm_squared(test::bf16_bytes_of(values).data(), true, n, nullptr));
  }
}

TEST(NormSquared, TheLargestFiniteValuesStayFinite) {
  const Floats values(10000, kMax);
  bool finite = false;
  const double squared = kernels::norm_squared(test::bytes_of(values).data(), false, values.size(), &finite);
  EXPECT_TRUE(finite);
  EXPECT_NEAR(squared, 1e4 * double{kMax} * double{kMax}, 1e-12 * squared);
}

TEST(NormSquared, TheSmallestValuesAreNotZero) {
  const Floats values(100, std::numeric_limits<float>::denorm_min());
  EXPECT_GT(kernels::norm_squared_f32(values.data(), values.size()), 0.0);
}

TEST(Finite, FindsOneBadValueAnywhere) {
  for (const std::uint64_t n : {1, 5, 16, 33, 200, 4096, 4099}) {
    for (const float bad : {kInf, -kInf, kNan}) {
      for (const std::uint64_t at : {std::uint64_t{0}, n / 2, n - 1}) {
        Floats values = test::random_floats(n, 3);
        for (const bool bf16 : {false, true}) {
          Bytes bytes = bf16 ? test::bf16_bytes_of(values) : test::bytes_of(values);
          bool finite = false;
          kernels::norm_squared(bytes.data(), bf16, n, &finite);
          EXPECT_TRUE(finite);
          EXPECT_TRUE(kernels::all_finite(bytes.data(), bf16, n));
          Floats spoiled = values;
          spoiled[at] = bad;
          test::Unaligned odd(bf16 ? test::bf16_bytes_of(spoiled) : test::bytes_of(spoiled));
          kernels::norm_squared(odd.data(), bf16, n, &finite);
          EXPECT_FALSE(finite) << n << " " << bad << " at " << at;
          EXPECT_FALSE(kernels::all_finite(odd.data(), bf16, n)) << n << " " << bad << " at " << at;
        }
      }
    }
  }
}

TEST(ScaledAccumulate, MultipliesAndAdds) {
  for (const std::uint64_t n : awkward_sizes()) {
    const Floats values = test::random_floats(n, 1);
    const Floats start = test::random_floats(n, 2);
    test::Unaligned payload(test::bytes_of(values));
    Floats first(n, kNan), added = start;
    kernels::scaled_accumulate(payload.data(), false, 0.3f, true, first.data(), n);
    kernels::scaled_accumulate(payload.data(), false, 0.3f, false, added.data(), n);
    for (std::uint64_t i = 0; i < n; ++i) {
      const float product = 0.3f * values[i];
      ASSERT_EQ(first[i], product);
      ASSERT_EQ(added[i], start[i] + product);
    }
  }
}

TEST(Scale, MayWorkInPlace) {
  Floats values = test::random_floats(1003, 9);
  const Floats before = values;
  kernels::scale(values.data(), -2.5f, values.data(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], -2.5f * before[i]);
}

TEST(MergeKernels, NothingToDo) {
  EXPECT_EQ(kernels::norm_squared(nullptr, true, 0, nullptr), 0.0);
  EXPECT_EQ(kernels::norm_squared_f32(nullptr, 0), 0.0);
  EXPECT_TRUE(kernels::all_finite(nullptr, false, 0));
  kernels::scaled_accumulate(nullptr, true, 1.0f, true, nullptr, 0);
  kernels::scale(nullptr, 1.0f, nullptr, 0);
}

}  // namespace
}  // namespace diloco
