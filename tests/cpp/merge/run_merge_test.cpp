#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <thread>

#include "merge/jobs.h"

namespace diloco {
namespace {

using test::Floats;
using test::JobBuilder;
using test::tensor;

// A matrix above one block, an embedding, a vector, a scalar and an empty tensor, in this order of names.
Layout model() {
  return {{tensor("a.weight", {70, 80}), tensor("b.embed", {10, 8}), tensor("c.bias", {33}), tensor("d.scale", {}),
           tensor("e.empty", {0, 8})}};
}
constexpr std::uint64_t kNumel = 5600 + 80 + 33 + 1;

JobBuilder full_job(WireDtype wire, WireDtype downlink) {
  JobBuilder builder(model(), test::random_floats(kNumel, 1), {}, wire, downlink);
  for (std::uint64_t m = 0; m < 4; ++m) {
    builder.add(test::random_floats(kNumel, 10 + m, 0.01f), 1.0 + static_cast<double>(m), fmt::format("learner-{}", m));
  }
  return builder;
}

TEST(RunMerge, EachTensorByItsRule) {
  JobBuilder builder(model(), Floats(kNumel));
  const std::vector<Floats> vectors = {test::random_floats(kNumel, 1), test::random_floats(kNumel, 2)};
  builder.add(vectors[0], 1.0).add(vectors[1], 3.0);
  const Floats got = test::merged_from_zero(builder);
  for (const Segment& segment : builder.job.in.segments) {
    if (segment.numel == 0) continue;
    const auto part = [&](const Floats& all) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(segment.element_offset);
      return Floats(begin, begin + static_cast<std::ptrdiff_t>(segment.numel));
    };
    const std::vector<Floats> parts = {part(vectors[0]), part(vectors[1])};
    const bool rda = builder.layout.tensors[segment.tensor].name == "a.weight";
    const test::Doubles expected = rda ? test::reference_rda(parts, {1, 3}) : test::reference_mean(parts, {1, 3});
    EXPECT_LE(test::distance(part(got), expected), 1e-6 * test::norm(expected)) << segment.tensor;
  }
}

// One learner, outer SGD with lr 1: theta becomes anchor - (anchor - local), whatever the merge rule.
TEST(RunMerge, OneLearnerWithLrOneLandsOnItsOwnWeights) {
  const Floats anchor = test::random_floats(kNumel, 1);
  const Floats local = test::random_floats(kNumel, 2);
  Floats displacement(kNumel);
  for (std::uint64_t i = 0; i < kNumel; ++i) displacement[i] = anchor[i] - local[i];
  JobBuilder builder(model(), anchor);
  builder.add(displacement, 123.0);
  const MergeResult result = run_merge(builder.job);
  ASSERT_TRUE(result.ok);
  EXPECT_EQ(result.next->version, (Version{1, 8}));
  EXPECT_EQ(result.next->outer_state, nullptr);
  const Floats theta = test::floats_of(*result.next->theta);
  for (std::uint64_t i = 0; i < kNumel; ++i) ASSERT_EQ(theta[i], anchor[i] - displacement[i]) << i;
}

// Theta 1, displacement 0.1, lr 0.7, momentum 0.9.
TEST(RunMerge, NesterovGoldenValuesOverThreeVersions) {
  const float thetas[] = {0.867f, 0.6773f, 0.43657f};
  const float states[] = {0.1f, 0.19f, 0.271f};
  JobBuilder builder({{tensor("x", {1})}}, {1.0f}, {0.0f});
  builder.nesterov(0.7f, 0.9f).add({0.1f}, 5.0);
  for (int step = 0; step < 3; ++step) {
    const MergeResult result = run_merge(builder.job);
    ASSERT_TRUE(result.ok);
    EXPECT_NEAR(result.next->theta->f32()[0], thetas[step], 1e-6);
    EXPECT_NEAR(result.next->outer_state->f32()[0], states[step], 1e-6);
    EXPECT_NEAR(result.delta_norm, 0.1, 1e-8);
    builder.job.previous = result.next;
  }
}

TEST(RunMerge, PreviousStateIsNotTouched) {
  JobBuilder builder(model(), test::random_floats(kNumel, 1), Floats(kNumel, 0.5f));
  builder.nesterov(0.7f, 0.9f).add(test::random_floats(kNumel, 2), 1.0);
  const Floats theta = test::floats_of(*builder.job.previous->theta);
  const Floats state = test::floats_of(*builder.job.previous->outer_state);
  ASSERT_TRUE(run_merge(builder.job).ok);
  EXPECT_EQ(test::bits_of(test::floats_of(*builder.job.previous->theta)), test::bits_of(theta));
  EXPECT_EQ(test::bits_of(test::floats_of(*builder.job.previous->outer_state)), test::bits_of(state));
}

// A bf16 image is a rounding of theta for the way; theta itself keeps every bit, so small updates add up (F104).
TEST(RunMerge, ThetaStaysF32UnderABf16Image) {
  JobBuilder builder({{tensor("w", {1, 1}, Dtype::kBf16)}}, {1.0f}, {}, WireDtype::kF32, WireDtype::kParam);
  builder.add({1e-3f}, 1.0);
  for (int round = 0; round < 100; ++round) {
    const MergeResult result = run_merge(builder.job);
    ASSERT_TRUE(result.ok);
    ASSERT_EQ(result.image.bytes->size(), 2u);
    builder.job.previous = result.next;
  }
  EXPECT_NEAR(builder.job.previous->theta->f32()[0], 0.9f, 1e-5f);
}

TEST(RunMerge, ImageIsTheEncodedTheta) {
  for (const WireDtype downlink : {WireDtype::kF32, WireDtype::kBf16, WireDtype::kParam}) {
    const JobBuilder builder = full_job(WireDtype::kBf16, downlink);
    const MergeResult result = run_merge(builder.job);
    ASSERT_TRUE(result.ok);
    test::Bytes expected(builder.job.out.bytes);
    encode_payload(builder.job.out, result.next->theta->f32(), expected.data());
    EXPECT_TRUE(std::ranges::equal(result.image.bytes->bytes(), expected));
    EXPECT_EQ(result.image.checksums, make_image(result.image.bytes, builder.job.chunk_bytes).checksums);
  }
}

TEST(RunMerge, DeltaNormIsThatOfTheMergedGradient) {
  JobBuilder builder(model(), Floats(kNumel));
  builder.add(test::random_floats(kNumel, 1), 1.0).add(test::random_floats(kNumel, 2), 3.0);
  const MergeResult result = run_merge(builder.job);
  EXPECT_NEAR(result.delta_norm, test::norm(test::doubles(test::floats_of(*result.next->theta))), 1e-9 * result.delta_norm);
}

// Above the size from which results go past the caches, with tensors above and below that of one part, at odd places.
Layout large_model() {
  return {{tensor("a.bias", {37}), tensor("b.weight", {700, 1001}), tensor("c.weight", {13, 999}), tensor("d.embed", {300, 1111}),
           tensor("e.weight", {64, 1024})}};
}

std::vector<test::Bytes> everything(const MergeResult& result) {
  const auto bytes = [](const ConstBufferPtr& buffer) { return test::Bytes(buffer->bytes().begin(), buffer->bytes().end()); };
  return {bytes(result.next->theta), bytes(result.next->outer_state), bytes(result.image.bytes)};
}

TEST(RunMerge, ThreadsAndTheirOrderDoNotMatter) {
  const Layout layout = large_model();
  const std::uint64_t numel = layout.numel();
  for (const bool shifted : {false, true}) {
    JobBuilder builder(layout, test::random_floats(numel, 1), test::random_floats(numel, 2, 0.1f), WireDtype::kBf16, WireDtype::kBf16);
    builder.nesterov(0.7f, 0.9f);
    ASSERT_LT(builder.job.out.bytes, 4 * numel);
    ASSERT_GT(builder.job.out.bytes, 2 * numel) << "there is padding";
    for (std::uint64_t m = 0; m < 5; ++m) {
      const Floats base = shifted && m % 2 == 1 ? test::random_floats(numel, 30 + m) : Floats{};
      builder.add(test::random_floats(numel, 10 + m, 0.01f), 1.0 + static_cast<double>(m), fmt::format("learner-{}", m), base);
    }
    const MergeResult alone = run_merge(builder.job);
    const std::vector<test::Bytes> expected = everything(alone);
    const auto backwards = [](std::size_t count, const std::function<void(std::size_t)>& body) {
      while (count > 0) body(--count);
    };
    const auto on_threads = [](std::size_t count, const std::function<void(std::size_t)>& body) {
      std::atomic<std::size_t> next{0};
      std::vector<std::thread> threads;
      for (int t = 0; t < 3; ++t) {
        threads.emplace_back([&] {
          for (std::size_t i = next++; i < count; i = next++) body(i);
        });
      }
      for (std::thread& thread : threads) thread.join();
    };
    BufferPool pool(std::size_t{1} << 30);
    for (const std::uint64_t bytes : {4 * numel, 4 * numel, builder.job.out.bytes}) {
      const BufferPtr used = pool.make(bytes);
      std::memset(used->data(), 0xff, used->size());
    }
    for (int round = 0; round < 3; ++round) {  // the later ones in buffers that have been used
      for (const Parallel& parallel : {Parallel(serially), Parallel(backwards), Parallel(on_threads)}) {
        const MergeResult again = run_merge(builder.job, pool, parallel);
        ASSERT_TRUE(again.ok);
        EXPECT_EQ(everything(again), expected);
        EXPECT_EQ(again.image.checksums, alone.image.checksums);
        EXPECT_EQ(again.delta_norm, alone.delta_norm);
      }
    }
    EXPECT_GT(pool.idle_bytes(), 0u);
  }
}

// A large fragment and its halves give the same, with each outer optimizer: the large one goes past the caches.
TEST(RunMerge, WayToMemoryDoesNotMatter) {
  const Layout whole{{tensor("a", {513, 1999}), tensor("b", {700, 1001})}};
  const Layout parts[] = {{{whole.tensors[0]}}, {{whole.tensors[1]}}};
  const std::uint64_t first = parts[0].numel(), numel = whole.numel();
  ASSERT_GE(numel, std::uint64_t{1} << 20);
  ASSERT_LT(std::max(first, numel - first), std::uint64_t{1} << 20);
  for (const OuterKind kind : {OuterKind::kSgd, OuterKind::kNesterov, OuterKind::kAdam, OuterKind::kDelayedNesterov}) {
    OuterOptions outer{kind, 0.7f, 0.9f};
    outer.delay = kind == OuterKind::kDelayedNesterov ? 2 : 1;
    const std::uint64_t states = outer_state_floats(outer);
    const Floats theta = test::random_floats(numel, 1);
    std::vector<Floats> state, work;
    for (std::uint64_t i = 0; i < states; ++i) state.push_back(test::random_floats(numel, 20 + i, 0.01f));
    for (Floats& values : state) std::ranges::for_each(values, [](float& x) { x = std::abs(x); });
    for (std::uint64_t m = 0; m < 3; ++m) work.push_back(test::random_floats(numel, 10 + m, 0.01f));
    const auto merged = [&](const Layout& layout, std::uint64_t begin, std::uint64_t count) {
      const auto cut = [&](const Floats& all) {
        const auto at = all.begin() + static_cast<std::ptrdiff_t>(begin);
        return Floats(at, at + static_cast<std::ptrdiff_t>(count));
      };
      Floats states_of;
      for (const Floats& values : state) std::ranges::copy(cut(values), std::back_inserter(states_of));
      JobBuilder builder(layout, cut(theta), states_of);
      builder.job.outer = outer;
      for (std::size_t m = 0; m < work.size(); ++m) builder.add(cut(work[m]), 1.0 + static_cast<double>(m));
      const MergeResult result = run_merge(builder.job);
      EXPECT_TRUE(result.ok);
      std::vector<Floats> out = {test::floats_of(*result.next->theta)};
      for (std::uint64_t i = 0; i < states; ++i) {
        const float* values = result.next->outer_state->f32() + i * count;
        out.emplace_back(values, values + count);
      }
      return out;
    };
    const auto large = merged(whole, 0, numel), a = merged(parts[0], 0, first), b = merged(parts[1], first, numel - first);
    for (std::size_t i = 0; i < large.size(); ++i) {
      Floats joined = a[i];
      joined.insert(joined.end(), b[i].begin(), b[i].end());
      EXPECT_EQ(test::bits_of(large[i]), test::bits_of(joined)) << static_cast<int>(kind) << " " << i;
    }
  }
}

// Large fragments take another way to memory than small ones; the arithmetic is the same.
TEST(RunMerge, LargeTensorsAreMergedByTheFormula) {
  const Layout layout = large_model();
  const std::uint64_t numel = layout.numel();
  JobBuilder builder(layout, Floats(numel));
  const std::vector<Floats> vectors = {test::random_floats(numel, 1), test::random_floats(numel, 2), test::random_floats(numel, 3)};
  builder.add(vectors[0], 1.0).add(vectors[1], 3.0).add(vectors[2], 2.0);
  const Floats got = test::merged_from_zero(builder);
  for (std::size_t i = 0; i < builder.job.in.segments.size(); ++i) {
    const Segment& segment = builder.job.in.segments[i];
    const auto part = [&](const Floats& all) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(segment.element_offset);
      return Floats(begin, begin + static_cast<std::ptrdiff_t>(segment.numel));
    };
    const std::vector<Floats> parts = {part(vectors[0]), part(vectors[1]), part(vectors[2])};
    const test::Doubles weights = {1, 3, 2};
    const test::Doubles expected = builder.job.use_rda[i] ? test::reference_rda(parts, weights) : test::reference_mean(parts, weights);
    EXPECT_LE(test::distance(part(got), expected), 1e-6 * test::norm(expected)) << i;
  }
}

TEST(RunMerge, ArrivalOrderDoesNotMatter) {
  JobBuilder builder = full_job(WireDtype::kBf16, WireDtype::kParam);
  const MergeResult reference = run_merge(builder.job);
  std::mt19937_64 engine(1);
  for (int round = 0; round < 5; ++round) {
    std::shuffle(builder.job.members.begin(), builder.job.members.end(), engine);  // arrival
    std::sort(builder.job.members.begin(), builder.job.members.end(),
              [](const MergeMember& a, const MergeMember& b) { return a.learner < b.learner; });
    const MergeResult again = run_merge(builder.job);
    EXPECT_EQ(again.image.checksums, reference.image.checksums);
    EXPECT_EQ(test::bits_of(test::floats_of(*again.next->theta)), test::bits_of(test::floats_of(*reference.next->theta)));
    EXPECT_EQ(again.delta_norm, reference.delta_norm);
  }
}

TEST(RunMerge, UnitOfWeightsDoesNotMatter) {
  JobBuilder builder = full_job(WireDtype::kF32, WireDtype::kF32);
  const MergeResult reference = run_merge(builder.job);
  for (MergeMember& member : builder.job.members) member.weight *= 1024.0;
  EXPECT_EQ(run_merge(builder.job).image.checksums, reference.image.checksums);
}

TEST(RunMerge, OnlyEmptyTensors) {
  JobBuilder builder({{tensor("a", {0}), tensor("b", {0, 8})}}, {});
  builder.add({}, 1.0).add({}, 2.0);
  const MergeResult result = run_merge(builder.job);
  ASSERT_TRUE(result.ok);
  EXPECT_EQ(result.next->theta->size(), 0u);
  EXPECT_TRUE(result.image.checksums.empty());
  EXPECT_EQ(result.delta_norm, 0.0);
}

// F026: () and (1,) both move, and as computed by hand.
TEST(RunMerge, ScalarsMove) {
  JobBuilder builder({{tensor("a", {}), tensor("b", {1})}}, {1.0f, 2.0f});
  builder.add({0.5f, 1.0f}, 1.0).add({1.0f, 0.0f}, 1.0);
  for (int round = 1; round <= 5; ++round) {
    builder.job.previous = run_merge(builder.job).next;
    EXPECT_EQ(test::floats_of(*builder.job.previous->theta), (Floats{1.0f - 0.75f * round, 2.0f - 0.5f * round}));
  }
}

}  // namespace
}  // namespace diloco
