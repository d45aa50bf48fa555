#include <gtest/gtest.h>

#include "diloco/fragment/plan.h"
#include "fragment/layouts.h"

namespace diloco {
namespace {

using test::tensor;

const Layout& mixed() {
  static const Layout layout = {{tensor("a", {3, 5}, Dtype::kF32), tensor("b", {7}, Dtype::kBf16), tensor("c", {}, Dtype::kF32),
                                 tensor("d", {0, 8}, Dtype::kF32), tensor("e", {2, 2}, Dtype::kBf16),
                                 tensor("f", {2, 3}, Dtype::kF64)}};
  return layout;
}

std::vector<Codec> codecs(PayloadKind kind, const Settings& settings) {
  const Plan plan = make_plan(mixed(), Fragmenter::kBalanced, 1);
  std::vector<Codec> result;
  for (const Segment& segment : payload_layout(mixed(), plan, 0, kind, settings).segments) result.push_back(segment.codec);
  return result;
}

constexpr Codec kWide = Codec::kF32;
constexpr Codec kHalf = Codec::kBf16;

TEST(PayloadLayout, ContributionsSendVectorsAndScalarsInF32) {
  Settings settings;
  settings.wire_dtype = WireDtype::kBf16;
  EXPECT_EQ(codecs(PayloadKind::kContribution, settings), (std::vector{kHalf, kWide, kWide, kHalf, kHalf, kHalf}));
  settings.wire_dtype = WireDtype::kF32;
  EXPECT_EQ(codecs(PayloadKind::kContribution, settings), std::vector(6, kWide));
}

TEST(PayloadLayout, AnchorsAreLossless) { EXPECT_EQ(codecs(PayloadKind::kAnchor, Settings{}), std::vector(6, kWide)); }

TEST(PayloadLayout, ImagesFollowTheDownlinkDtype) {
  Settings settings;
  settings.downlink_dtype = WireDtype::kParam;
  EXPECT_EQ(codecs(PayloadKind::kImage, settings), (std::vector{kWide, kHalf, kWide, kWide, kHalf, kWide}));
  settings.downlink_dtype = WireDtype::kBf16;
  EXPECT_EQ(codecs(PayloadKind::kImage, settings), std::vector(6, kHalf));
  settings.downlink_dtype = WireDtype::kF32;
  EXPECT_EQ(codecs(PayloadKind::kImage, settings), std::vector(6, kWide));
}

TEST(PayloadLayout, SegmentsStartAtMultiplesOf64) {
  const Plan plan = make_plan(mixed(), Fragmenter::kBalanced, 1);
  const PayloadLayout layout = payload_layout(mixed(), plan, 0, PayloadKind::kContribution, Settings{});
  const std::vector<std::uint64_t> offsets = {0, 64, 128, 192, 192, 256};
  const std::vector<std::uint64_t> elements = {0, 15, 22, 23, 23, 27};
  ASSERT_EQ(layout.segments.size(), 6u);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(layout.segments[i].tensor, i);
    EXPECT_EQ(layout.segments[i].byte_offset, offsets[i]) << i;
    EXPECT_EQ(layout.segments[i].element_offset, elements[i]) << i;
  }
  EXPECT_EQ(layout.numel, 33u);
  EXPECT_EQ(layout.bytes, 256u + 6 * 2);
}

TEST(PayloadLayout, OnlyEmptyTensorsTakeNoBytes) {
  const Layout layout = {{tensor("a", {0}), tensor("b", {0, 8})}};
  const PayloadLayout payload =
      payload_layout(layout, make_plan(layout, Fragmenter::kBalanced, 1), 0, PayloadKind::kContribution, Settings{});
  EXPECT_EQ(payload.segments.size(), 2u);
  EXPECT_EQ(payload.numel, 0u);
  EXPECT_EQ(payload.bytes, 0u);
}

TEST(PayloadLayout, SegmentsNeverOverlap) {
  std::mt19937_64 engine(9);
  for (int round = 0; round < 200; ++round) {
    const Layout layout = test::random_layout(engine);
    const Plan plan = make_plan(layout, Fragmenter::kBalanced, 4);
    for (FragmentId p = 0; p < plan.size(); ++p) {
      for (const PayloadKind kind : {PayloadKind::kContribution, PayloadKind::kAnchor, PayloadKind::kImage}) {
        const PayloadLayout payload = payload_layout(layout, plan, p, kind, Settings{});
        std::uint64_t bytes = 0, elements = 0;
        for (const Segment& segment : payload.segments) {
          ASSERT_GE(segment.byte_offset, bytes);
          ASSERT_EQ(segment.byte_offset % 64, 0u);
          ASSERT_EQ(segment.element_offset, elements);
          bytes = segment.byte_offset + segment.numel * (segment.codec == Codec::kBf16 ? 2 : 4);
          elements += segment.numel;
        }
        ASSERT_EQ(payload.bytes, bytes);
        ASSERT_EQ(payload.numel, elements);
        ASSERT_EQ(elements, plan.fragments[p].numel);
      }
    }
  }
}

// F046: a marker in the last of more than 2^31 elements has a 64-bit address.
TEST(PayloadLayout, HugeTensors) {
  const std::int64_t huge = (std::int64_t{1} << 31) + 8;
  const Layout layout = {{tensor("a", {huge, 2}, Dtype::kBf16), tensor("b", {3})}};
  const PayloadLayout payload =
      payload_layout(layout, make_plan(layout, Fragmenter::kBalanced, 1), 0, PayloadKind::kContribution, Settings{});
  EXPECT_EQ(payload.segments[1].byte_offset, 4 * static_cast<std::uint64_t>(huge) + 32);
  EXPECT_EQ(payload.segments[1].byte_offset % 64, 0u);
}

TEST(PayloadLayout, UnknownFragmentThrows) {
  const Layout layout = test::of_sizes({1});
  EXPECT_THROW(payload_layout(layout, make_plan(layout, Fragmenter::kBalanced, 1), 1, PayloadKind::kAnchor, Settings{}),
               std::out_of_range);
}

}  // namespace
}  // namespace diloco
