#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
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

// Whatever the number of members, their types and addresses, and from whichever element on: the sum from the left, every
// product and sum rounded once. `bf16` of the member's number: with runs of four equal types and without.
void expect_sums_from_the_left(const std::function<bool(std::size_t)>& bf16) {
  for (const std::uint64_t n : awkward_sizes()) {
    for (std::size_t count = 0; count <= 11; ++count) {
      const std::uint64_t at = count % 3;
      std::vector<test::Unaligned> payloads;
      std::vector<Floats> values;
      std::vector<kernels::WeightedPayload> members;
      for (std::size_t m = 0; m < count; ++m) {
        values.push_back(test::random_floats(at + n, m));
        const Bytes narrow = test::bf16_bytes_of(values[m]);
        if (bf16(m)) kernels::bf16_to_f32(narrow.data(), at + n, values[m].data());
        payloads.emplace_back(bf16(m) ? narrow : test::bytes_of(values[m]));
        members.push_back({nullptr, bf16(m), 0.3f * static_cast<float>(m) - 1.0f});
      }
      for (std::size_t m = 0; m < count; ++m) members[m].payload = payloads[m].data();
      Floats out(n, kNan);
      kernels::weighted_sum(members.data(), count, at, out.data(), n);
      for (std::uint64_t i = 0; i < n; ++i) {
        float expected = 0.0f;
        for (std::size_t m = 0; m < count; ++m) {
          const float product = members[m].weight * values[m][at + i];
          expected = m == 0 ? product : expected + product;
        }
        ASSERT_EQ(test::bits(out[i]), test::bits(expected)) << count << " members, element " << i << " of " << n;
      }
    }
  }
}

TEST(WeightedSum, IsTheSumFromTheLeft) {
  expect_sums_from_the_left([](std::size_t) { return false; });
  expect_sums_from_the_left([](std::size_t) { return true; });
  expect_sums_from_the_left([](std::size_t m) { return m < 5; });
  expect_sums_from_the_left([](std::size_t m) { return m % 5 < 2; });
}

TEST(Stream, CopiesAnyBytesAtAnyAddress) {
  const Bytes from = test::bytes_of(test::random_floats(300, 4));
  for (const std::uint64_t bytes : {0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 1000}) {
    for (std::uint64_t in = 0; in < 20; in += 3) {
      for (std::uint64_t out = 0; out < 20; ++out) {
        Bytes to(1100, std::byte{7});
        kernels::stream(from.data() + in, bytes, to.data() + out);
        ASSERT_TRUE(std::equal(to.begin() + out, to.begin() + out + bytes, from.begin() + in));
        ASSERT_EQ(std::count(to.begin(), to.begin() + out, std::byte{7}), static_cast<std::ptrdiff_t>(out));
        ASSERT_TRUE(std::all_of(to.begin() + out + bytes, to.end(), [](std::byte b) { return b == std::byte{7}; }));
      }
    }
  }
}

struct StepCase {
  bool momentum = false, bf16 = false, streams = false;
  std::uint64_t shift = 0;  // of all outputs, in elements: with 1 none can be streamed to, with 4 the f32 ones can
};

std::vector<StepCase> step_cases() {
  std::vector<StepCase> cases;
  for (const bool momentum : {false, true}) {
    for (const bool bf16 : {false, true}) {
      for (const bool streams : {false, true}) {
        for (const std::uint64_t shift : {0, 1, 4}) cases.push_back({momentum, bf16, streams, shift});
      }
    }
  }
  return cases;
}

// The same bits as one step after the other, and nothing beside the outputs is touched.
TEST(MergeStep, IsTheSeparateStepsInOnePass) {
  constexpr float kLr = 0.7f, kMu = 0.9f;
  for (const StepCase& c : step_cases()) {
    for (const std::uint64_t n : awkward_sizes()) {
      if (n > kernels::kBlock) continue;
      const Floats a = test::random_floats(n, 1), b = test::random_floats(n, 2), theta = test::random_floats(n, 3),
                   momentum = test::random_floats(n, 4);
      test::Unaligned first(test::bytes_of(a)), second(test::bf16_bytes_of(b));
      const kernels::WeightedPayload members[] = {{first.data(), false, 0.3f}, {second.data(), true, -1.7f}};
      Floats gradient(n), expected_theta(n), expected_momentum(n);
      kernels::weighted_sum(members, 2, 0, gradient.data(), n);
      for (std::uint64_t i = 0; i < n; ++i) {
        float direction = gradient[i];
        if (c.momentum) {
          expected_momentum[i] = kMu * momentum[i] + gradient[i];
          direction = gradient[i] + kMu * expected_momentum[i];
        }
        expected_theta[i] = theta[i] - kLr * direction;
      }
      const Bytes expected_image = c.bf16 ? test::bf16_bytes_of(expected_theta) : test::bytes_of(expected_theta);

      constexpr float kEdge = 7.0f;
      Floats out_theta(n + 16, kEdge), out_momentum(n + 16, kEdge);
      Bytes image(4 * n + 64, std::byte{7});
      std::byte* const image_at = image.data() + c.shift * (c.bf16 ? 2 : 4);
      const kernels::StepSums sums = kernels::merge_step(
          {members, 2, 0, theta.data(), c.momentum ? momentum.data() : nullptr, kLr, kMu},
          {out_theta.data() + c.shift, c.momentum ? out_momentum.data() + c.shift : nullptr, image_at, c.bf16, c.streams}, n);
      EXPECT_EQ(sums.squares, kernels::norm_squared_f32(gradient.data(), n));
      EXPECT_TRUE(sums.finite);
      const auto inside = [&](const Floats& all) { return Floats(all.begin() + c.shift, all.begin() + c.shift + n); };
      ASSERT_EQ(test::bits_of(inside(out_theta)), test::bits_of(expected_theta)) << n;
      if (c.momentum) {
        ASSERT_EQ(test::bits_of(inside(out_momentum)), test::bits_of(expected_momentum)) << n;
      }
      ASSERT_TRUE(std::equal(expected_image.begin(), expected_image.end(), image_at));
      EXPECT_EQ(out_theta[c.shift + n], kEdge);
      EXPECT_EQ(image_at[expected_image.size()], std::byte{7});
    }
  }
}

// RDA's second pass: its sum lies where theta is going to be.
TEST(MergeStep, ThetaMayTakeThePlaceOfThePayload) {
  for (const StepCase& c : step_cases()) {
    for (const std::uint64_t n : {1, 63, 64, 65, 1000, 4096}) {
      const Floats sum = test::random_floats(n, 1), theta = test::random_floats(n, 2), momentum = test::random_floats(n, 3);
      const auto run = [&](const float* payload, float* out) {
        Floats out_momentum(n + 4);
        Bytes image(4 * n + 16);
        const kernels::WeightedPayload scaled{reinterpret_cast<const std::byte*>(payload), false, 1.3f};
        kernels::merge_step({&scaled, 1, 0, theta.data(), c.momentum ? momentum.data() : nullptr, 0.7f, 0.9f},
                            {out, c.momentum ? out_momentum.data() : nullptr, image.data(), c.bf16, c.streams}, n);
        return image;
      };
      Floats apart(n + c.shift), place(n + c.shift);
      std::copy(sum.begin(), sum.end(), place.begin() + static_cast<std::ptrdiff_t>(c.shift));
      EXPECT_EQ(run(sum.data(), apart.data() + c.shift), run(place.data() + c.shift, place.data() + c.shift));
      EXPECT_EQ(test::bits_of(Floats(apart.begin() + c.shift, apart.end())),
                test::bits_of(Floats(place.begin() + c.shift, place.end())));
    }
  }
}

TEST(MergeStep, FindsWhatIsNotFiniteAnywhere) {
  for (const StepCase& c : step_cases()) {
    for (const std::uint64_t n : {1, 63, 64, 65, 4096}) {
      for (const std::uint64_t at : {std::uint64_t{0}, n / 2, n - 1}) {
        Floats values(n, 1.0f), theta(n, 1.0f), momentum(n, 1.0f), out_theta(n + 4), out_momentum(n + 4);
        Bytes payload = test::bytes_of(values), image(4 * n + 16);
        const auto finite = [&] {
          const kernels::WeightedPayload member{payload.data(), false, 1.0f};
          return kernels::merge_step({&member, 1, 0, theta.data(), c.momentum ? momentum.data() : nullptr, 1.0f, 0.5f},
                                     {out_theta.data(), c.momentum ? out_momentum.data() : nullptr, image.data(), c.bf16, c.streams}, n)
              .finite;
        };
        EXPECT_TRUE(finite());
        theta[at] = kNan;
        EXPECT_FALSE(finite());
        theta[at] = kMax;  // finite, but rounds to Inf in bf16
        EXPECT_EQ(finite(), !c.bf16);
        theta[at] = 1.0f;
        if (c.momentum) {
          momentum[at] = -kInf;
          EXPECT_FALSE(finite());
        }
      }
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
  kernels::weighted_sum(nullptr, 0, 0, nullptr, 0);
  kernels::stream(nullptr, 0, nullptr);
  kernels::scale(nullptr, 1.0f, nullptr, 0);
}

}  // namespace
}  // namespace diloco
