// Every instruction set must give the same bits: learners and syncer run on different machines, and replays must repeat.
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/arrays.h"

#define DILOCO_DECLARE_CLONE(name)                                                                              \
  namespace diloco::name {                                                                                      \
  void f32_to_bf16(const float*, std::uint64_t, std::byte*);                                                    \
  void bf16_to_f32(const std::byte*, std::uint64_t, float*);                                                    \
  void fragment_diff_f32(const float*, const float*, std::uint64_t, std::byte*);                                \
  void fragment_diff_bf16(const float*, const float*, std::uint64_t, std::byte*);                               \
  void adopt_blend(const float*, float, float*, float*, std::uint64_t);                                         \
  void adopt_rebase(const float*, const float*, float*, float*, std::uint64_t);                                 \
  double norm_squared(const std::byte*, bool, std::uint64_t, bool*);                                            \
  struct WeightedPayload {                                                                                      \
    const std::byte* payload;                                                                                   \
    bool bf16;                                                                                                  \
    float weight;                                                                                               \
  };                                                                                                            \
  void weighted_sum(const WeightedPayload*, std::size_t, std::uint64_t, float*, std::uint64_t);                 \
  struct StepIn {                                                                                               \
    const WeightedPayload* members;                                                                             \
    std::size_t count;                                                                                          \
    std::uint64_t at;                                                                                           \
    const float *theta, *momentum;                                                                              \
    float lr, mu;                                                                                               \
  };                                                                                                            \
  struct StepOut {                                                                                              \
    float *theta, *momentum;                                                                                    \
    std::byte* image;                                                                                           \
    bool bf16, streams;                                                                                         \
  };                                                                                                            \
  struct StepSums {                                                                                             \
    double squares;                                                                                             \
    bool finite;                                                                                                \
  };                                                                                                            \
  StepSums merge_step(const StepIn&, const StepOut&, std::uint64_t);                                            \
  void scale(const float*, float, float*, std::uint64_t);                                                       \
  bool all_finite(const std::byte*, bool, std::uint64_t);                                                       \
  }

#ifdef DILOCO_TEST_CLONES
DILOCO_DECLARE_CLONE(kernels_baseline)
DILOCO_DECLARE_CLONE(kernels_v3)
DILOCO_DECLARE_CLONE(kernels_v4)

namespace diloco {
namespace {

using test::Bytes;
using test::Floats;

// Results of every kernel on the same data, as bytes.
struct Results {
  std::vector<Bytes> arrays;
  std::vector<double> sums;
  bool operator==(const Results&) const = default;
};

struct Input {
  Floats a, b, c;
  Bytes halves;
};

#define DILOCO_RUN_CLONE(ns)                                                                                    \
  [](const Input& in) {                                                                                         \
    const std::uint64_t n = in.a.size();                                                                        \
    Results out;                                                                                                \
    Bytes wide(n * 4), narrow(n * 2);                                                                           \
    Floats x = in.b, y = in.c, z(n);                                                                            \
    ns::f32_to_bf16(in.a.data(), n, narrow.data());                                                             \
    out.arrays.push_back(narrow);                                                                               \
    ns::fragment_diff_bf16(in.a.data(), in.b.data(), n, narrow.data());                                         \
    out.arrays.push_back(narrow);                                                                               \
    ns::fragment_diff_f32(in.a.data(), in.b.data(), n, wide.data());                                            \
    out.arrays.push_back(wide);                                                                                 \
    ns::bf16_to_f32(in.halves.data(), n, z.data());                                                             \
    out.arrays.push_back(test::bytes_of(z));                                                                    \
    ns::adopt_blend(in.a.data(), 0.3f, x.data(), y.data(), n);                                                  \
    ns::adopt_rebase(in.b.data(), in.c.data(), x.data(), y.data(), n);                                          \
    ns::adopt_rebase(in.c.data(), nullptr, x.data(), y.data(), n);                                              \
    out.arrays.push_back(test::bytes_of(x));                                                                    \
    out.arrays.push_back(test::bytes_of(y));                                                                    \
    const ns::WeightedPayload wides{wide.data(), false, 0.123f}, halves{in.halves.data(), true, -0.9f};         \
    const std::vector<ns::WeightedPayload> groups[] = {{wides, wides, wides, wides, halves, halves, halves, halves, wides}, \
                                                       {halves, halves, halves, halves, wides, wides, wides, wides, halves}, \
                                                       {wides}};                                                \
    for (const auto& group : groups) {                                                                          \
      ns::weighted_sum(group.data(), group.size(), 0, z.data(), n);                                             \
      out.arrays.push_back(test::bytes_of(z));                                                                  \
      for (int kind = 0; kind < 8; ++kind) {                                                                    \
        const bool momentum = kind & 1, bf16 = kind & 2, streams = kind & 4;                                    \
        Floats theta(n), moved(n);                                                                              \
        Bytes image(n * 4);                                                                                     \
        for (std::uint64_t at = 0; at < n; at += kernels::kBlock) {                                             \
          const ns::StepSums sums = ns::merge_step(                                                             \
              {group.data(), group.size(), at, in.a.data() + at, momentum ? in.b.data() + at : nullptr, 0.7f, 0.9f}, \
              {theta.data() + at, momentum ? moved.data() + at : nullptr, image.data() + at * (bf16 ? 2 : 4), bf16, streams}, \
              std::min(kernels::kBlock, n - at));                                                               \
          out.sums.insert(out.sums.end(), {sums.squares, double(sums.finite)});                                 \
        }                                                                                                       \
        out.arrays.insert(out.arrays.end(), {test::bytes_of(theta), test::bytes_of(moved), image});             \
      }                                                                                                         \
    }                                                                                                           \
    ns::scale(z.data(), 0.77f, z.data(), n);                                                                    \
    out.arrays.push_back(test::bytes_of(z));                                                                    \
    for (const double sum : {ns::norm_squared(wide.data(), false, n, nullptr),                                  \
                             ns::norm_squared(in.halves.data(), true, n, nullptr),                              \
                             double(ns::all_finite(wide.data(), false, n)),                                     \
                             double(ns::all_finite(in.halves.data(), true, n))}) {                              \
      out.sums.push_back(sum);                                                                                  \
    }                                                                                                           \
    return out;                                                                                                 \
  }

using Run = Results (*)(const Input&);

Input make_input(std::uint64_t n, std::uint64_t seed) {
  Input in{test::random_floats(n, seed), test::random_floats(n, seed + 1), test::random_floats(n, seed + 2), Bytes(n * 2)};
  kernels::f32_to_bf16(in.c.data(), n, in.halves.data());
  return in;
}

void expect_same_bits(Run run) {
  const Run reference = DILOCO_RUN_CLONE(kernels);
  for (const std::uint64_t n : {0, 1, 3, 15, 16, 17, 63, 64, 65, 1000, 4095, 4096, 4097, 20000}) {
    const Input in = make_input(n, 7 + n);
    EXPECT_EQ(reference(in), run(in)) << n << " elements";
  }
}

TEST(Clones, BaselineWithoutVectors) { expect_same_bits(DILOCO_RUN_CLONE(kernels_baseline)); }

TEST(Clones, Avx2) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) GTEST_SKIP() << "this CPU has no AVX2";
  expect_same_bits(DILOCO_RUN_CLONE(kernels_v3));
}

TEST(Clones, Avx512) {
  for (const bool has : {__builtin_cpu_supports("avx512f") != 0, __builtin_cpu_supports("avx512bw") != 0,
                         __builtin_cpu_supports("avx512dq") != 0, __builtin_cpu_supports("avx512vl") != 0}) {
    if (!has) GTEST_SKIP() << "this CPU has no AVX-512";
  }
  expect_same_bits(DILOCO_RUN_CLONE(kernels_v4));
}

}  // namespace
}  // namespace diloco
#endif
