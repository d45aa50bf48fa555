#include "diloco/fragment/layout.h"

#include <gtest/gtest.h>

#include <limits>

#include "diloco/base/errors.h"
#include "fragment/layouts.h"

namespace diloco {
namespace {

using test::tensor;

std::string refusal(const Layout& layout) {
  try {
    check_layout(layout);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Layout, NumelOfScalarsEmptyAndHugeTensors) {
  EXPECT_EQ(tensor("a", {}).numel(), 1u);
  EXPECT_EQ(tensor("a", {1}).numel(), 1u);
  EXPECT_EQ(tensor("a", {0, 8}).numel(), 0u);
  EXPECT_EQ(tensor("a", {std::numeric_limits<std::int64_t>::max(), 9, 0}).numel(), 0u);
  EXPECT_EQ(tensor("a", {1 << 16, (1 << 15) + 1}).numel(), (std::uint64_t{1} << 31) + (1u << 16));
  EXPECT_EQ(tensor("a", {std::int64_t{1} << 40, std::int64_t{1} << 40}).numel(), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(tensor("a", {-1}).numel(), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ((Layout{{tensor("a", {2, 3}), tensor("b", {}), tensor("c", {0})}}).numel(), 7u);
}

TEST(Layout, NamesOfDtypesAndShapes) {
  EXPECT_STREQ(dtype_name(Dtype::kBf16), "bfloat16");
  EXPECT_EQ(dtype_bytes(Dtype::kF64), 8u);
  EXPECT_STREQ(dtype_name(static_cast<Dtype>(99)), "unknown");
  EXPECT_EQ(shape_text({}), "()");
  EXPECT_EQ(shape_text({5}), "(5,)");
  EXPECT_EQ(shape_text({10, 64}), "(10, 64)");
}

TEST(FirstDifference, NamesTheParameterOnBothSides) {
  const Layout ours = {{tensor("embed", {4, 4}), tensor("head.weight", {10, 64})}};
  const Layout run = {{tensor("embed", {4, 4}), tensor("head.weight", {10, 128})}};
  EXPECT_EQ(first_difference(ours, run),
            "parameter 'head.weight': this learner has float32 (10, 64), the run has float32 (10, 128)");
}

TEST(FirstDifference, SeesDtypes) {
  EXPECT_EQ(first_difference({{tensor("w", {2}, Dtype::kF32)}}, {{tensor("w", {2}, Dtype::kBf16)}}),
            "parameter 'w': this learner has float32 (2,), the run has bfloat16 (2,)");
}

TEST(FirstDifference, SeesTheSameNumberOfElementsInAnotherShape) {
  EXPECT_NE(first_difference({{tensor("w", {6, 2})}}, {{tensor("w", {2, 6})}}), "");
  EXPECT_NE(first_difference({{tensor("w", {1})}}, {{tensor("w", {})}}), "");
}

TEST(FirstDifference, SeesMissingAndExtraParameters) {
  const Layout small = {{tensor("a", {2})}};
  const Layout large = {{tensor("a", {2}), tensor("b", {3})}};
  EXPECT_EQ(first_difference(small, large),
            "parameter 'b': this learner has it not at all (absent or not trainable), the run has float32 (3,)");
  EXPECT_EQ(first_difference(large, small),
            "parameter 'b': this learner has float32 (3,), the run has it not at all (absent or not trainable)");
}

TEST(FirstDifference, SeesTies) {
  const Layout tied = {{tensor("embed", {4, 2}, Dtype::kF32, {"head"})}};
  const Layout untied = {{tensor("embed", {4, 2}), tensor("head", {4, 2})}};
  EXPECT_EQ(first_difference(tied, untied),
            "parameter 'embed' (float32 (4, 2)): on this learner it is tied to 'head', in the run it is not tied to "
            "another; also different: 'head'");
  EXPECT_NE(first_difference(untied, tied).find("'embed'"), std::string::npos);
  EXPECT_NE(first_difference({{tensor("head", {4, 2}, Dtype::kF32, {"embed"})}}, tied).find("another name of 'head'"),
            std::string::npos);
}

// F039: another set of frozen layers is found by name, and more names than the first are told.
TEST(FirstDifference, ListsFurtherNames) {
  Layout ours, run;
  for (int i = 0; i < 8; ++i) run.tensors.push_back(tensor(fmt::format("layer{}", i), {4, 4}));
  ours.tensors = {run.tensors[0]};
  const std::string text = first_difference(ours, run);
  EXPECT_NE(text.find("parameter 'layer1'"), std::string::npos) << text;
  EXPECT_NE(text.find("'layer2', 'layer3', 'layer4', 'layer5' and 2 more"), std::string::npos) << text;
}

TEST(FirstDifference, OrderOfRegistrationIsNone) {
  const Layout ours = {{tensor("a", {2}), tensor("b", {2}, Dtype::kF32, {"x", "y"})}};
  const Layout run = {{tensor("b", {2}, Dtype::kF32, {"y", "x"}), tensor("a", {2})}};
  EXPECT_EQ(first_difference(ours, run), "");
  EXPECT_EQ(first_difference(ours, ours), "");
}

TEST(CheckLayout, AcceptsScalarsAndEmptyTensors) {
  EXPECT_EQ(refusal({{tensor("a", {}), tensor("b", {0, 8}), tensor("c", {3}, Dtype::kF16, {"d"})}}), "");
}

TEST(CheckLayout, RefusesWhatCannotBePlanned) {
  EXPECT_NE(refusal({}).find("nothing to synchronise"), std::string::npos);
  EXPECT_NE(refusal({{tensor("", {1})}}).find("empty name"), std::string::npos);
  EXPECT_NE(refusal({{tensor("a", {1}), tensor("a", {1})}}).find("'a' is listed twice"), std::string::npos);
  EXPECT_NE(refusal({{tensor("a", {1}), tensor("b", {1}, Dtype::kF32, {"a"})}}).find("'a' is in use"), std::string::npos);
  EXPECT_NE(refusal({{tensor("a", {2, -1})}}).find("(2, -1) has a negative dimension"), std::string::npos);
  EXPECT_NE(refusal({{tensor("a", {1}, static_cast<Dtype>(7))}}).find("dtype number 7"), std::string::npos);
  EXPECT_EQ(refusal({{tensor("a", {std::int64_t{1} << 62})}}), "");
  EXPECT_NE(refusal({{tensor("a", {std::int64_t{1} << 62}), tensor("b", {})}}).find("2^62"), std::string::npos);
  EXPECT_NE(refusal({{tensor("a", {std::int64_t{1} << 40, std::int64_t{1} << 40})}}).find("2^62"), std::string::npos);
}

}  // namespace
}  // namespace diloco
