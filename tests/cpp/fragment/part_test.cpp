#include "diloco/fragment/part.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>

#include "diloco/base/types.h"

namespace diloco {
namespace {

using Random = std::mt19937_64;

Layout layout_of(const std::vector<std::vector<std::int64_t>>& shapes) {
  Layout layout;
  for (std::size_t i = 0; i < shapes.size(); ++i) layout.tensors.push_back({"t" + std::to_string(i), shapes[i], Dtype::kF32, {}});
  return layout;
}

Plan one_fragment(const Layout& layout) { return make_plan(layout, Fragmenter::kTensor, 1); }

// Cuts every tensor along some dimensions into `parts` boxes; some tensors are held whole by everybody.
std::vector<Part> any_parts(Random& random, const Layout& layout, std::size_t parts) {
  std::vector<Part> out(parts);
  for (const TensorSpec& tensor : layout.tensors) {
    const bool replicated = tensor.shape.empty() || random() % 4 == 0;
    const std::size_t d = replicated ? 0 : random() % tensor.shape.size();
    std::vector<std::int64_t> cuts = {0};
    if (!replicated) {
      for (std::size_t i = 1; i < parts; ++i) cuts.push_back(static_cast<std::int64_t>(random() % (tensor.shape[d] + 1)));
      std::sort(cuts.begin(), cuts.end());
      cuts.push_back(tensor.shape[d]);
    }
    for (std::size_t part = 0; part < parts; ++part) {
      Box box = whole_box(tensor);
      if (!replicated) {
        box.offset[d] = cuts[part];
        box.shape[d] = cuts[part + 1] - cuts[part];
      }
      out[part].push_back(box);
    }
  }
  return out;
}

std::vector<std::byte> numbered(std::uint64_t bytes) {
  std::vector<std::byte> out(bytes);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::byte>((i * 2654435761u) >> 13);
  return out;
}

// What is gathered from a whole payload and scattered into another one in chunks of any size is the same payload; the part's
// own payload layout has the same size.
TEST(PartMap, GatherAndScatterAreInverseInChunksOfAnySize) {
  Random random(3);
  for (int round = 0; round < 200; ++round) {
    const Layout layout = layout_of({{static_cast<std::int64_t>(1 + random() % 9), static_cast<std::int64_t>(1 + random() % 7)},
                                     {static_cast<std::int64_t>(random() % 5)},
                                     {},
                                     {2, static_cast<std::int64_t>(1 + random() % 4), 3}});
    const Plan plan = one_fragment(layout);
    Settings settings;
    settings.wire_dtype = round % 2 ? WireDtype::kBf16 : WireDtype::kF32;
    const auto kind = round % 3 ? PayloadKind::kContribution : PayloadKind::kAnchor;
    const PayloadLayout whole = payload_layout(layout, plan, 0, kind, settings);
    const auto parts = any_parts(random, layout, 1 + random() % 4);
    ASSERT_EQ(parts_fault(layout, parts), "");
    const auto owned = owners(parts);
    const auto source = numbered(whole.bytes);
    std::vector<std::byte> target(whole.bytes);
    for (std::size_t part = 0; part < parts.size(); ++part) {
      const PartMap map(layout, whole, parts[part], owned[part]);
      ASSERT_EQ(map.bytes(), payload_layout(layout_of_part(layout, parts[part]), plan, 0, kind, settings).bytes);
      for (std::uint64_t at = 0; at < map.bytes();) {
        std::vector<std::byte> chunk(std::min<std::uint64_t>(1 + random() % 50, map.bytes() - at));
        map.gather(source.data(), at, chunk);
        map.scatter(at, chunk, target.data());
        at += chunk.size();
      }
    }
    for (const Segment& segment : whole.segments) {
      const std::uint64_t bytes = segment.numel * (segment.codec == Codec::kBf16 ? 2 : 4);
      ASSERT_EQ(std::memcmp(source.data() + segment.byte_offset, target.data() + segment.byte_offset, bytes), 0);
    }
  }
}

TEST(PartMap, GathersColumnsInRowMajorOrder) {
  const Layout layout = layout_of({{2, 4}});
  const PayloadLayout whole = payload_layout(layout, one_fragment(layout), 0, PayloadKind::kAnchor, Settings{});
  std::vector<float> values(8);
  std::iota(values.begin(), values.end(), 0.0f);
  const PartMap map(layout, whole, {{{0, 1}, {2, 2}, false}});
  std::vector<float> part(4);
  ASSERT_EQ(map.bytes(), 16u);
  map.gather(reinterpret_cast<const std::byte*>(values.data()), 0, std::as_writable_bytes(std::span(part)));
  EXPECT_EQ(part, (std::vector<float>{1, 2, 5, 6}));
}

TEST(Parts, TheLowestPartThatHoldsABoxOwnsIt) {
  const Layout layout = layout_of({{4}, {}});
  const Box whole = whole_box(layout.tensors[0]), scalar = whole_box(layout.tensors[1]), none{{}, {}, true};
  const std::vector<Part> parts = {{{{0}, {2}, false}, none}, {{{2}, {2}, false}, scalar}, {{{0}, {2}, false}, scalar}};
  EXPECT_EQ(parts_fault(layout, parts), "");
  EXPECT_EQ(owners(parts), (std::vector<std::vector<bool>>{{true, false}, {true, true}, {false, false}}));
  EXPECT_EQ(parts_fault(layout, {{whole, scalar}, {whole, scalar}}), "");
}

TEST(Parts, FaultsNameTheTensorAndTheParts) {
  const Layout layout = layout_of({{4, 2}});
  const auto fault = [&](const Box& a, const Box& b) { return parts_fault(layout, {{a}, {b}}); };
  EXPECT_EQ(fault({{0, 0}, {2, 2}, false}, {{2, 0}, {1, 2}, false}), "parameter 't0': the parts hold 6 of its 8 elements");
  EXPECT_EQ(fault({{0, 0}, {3, 2}, false}, {{2, 0}, {2, 2}, false}),
            "parameter 't0': parts 0 and 1 hold (3, 2) at (0, 0) and (2, 2) at (2, 0), which overlap without being equal");
  EXPECT_EQ(fault({{0, 0}, {2, 2}, false}, {{2, 0}, {3, 2}, false}),
            "part 1 holds (3, 2) at (2, 0) of parameter 't0', which is (4, 2)");
  EXPECT_EQ(fault({{0}, {2}, false}, {{2, 0}, {2, 2}, false}),
            "part 0 holds (2,) at (0,) of parameter 't0', which is (4, 2)");
  EXPECT_EQ(parts_fault(layout, {{}}), "part 0 has 0 tensors, the model 1");
}

}  // namespace
}  // namespace diloco
