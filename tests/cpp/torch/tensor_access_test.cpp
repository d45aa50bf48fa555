#include "diloco/torch/tensor_access.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "diloco/base/errors.h"

namespace diloco {
namespace {

std::vector<float> values_of(const at::Tensor& tensor) {
  std::vector<float> out(static_cast<std::size_t>(tensor.numel()));
  read_tensor(tensor, out.data());
  return out;
}

// One tensor of every kind that a model may hold, all with the logical values 0, 1, 2, ... (2, 3, 4, 5) or fewer.
struct Kind {
  const char* name;
  at::Tensor (*make)();
};

at::Tensor ascending() { return at::arange(120, at::kFloat).reshape({2, 3, 4, 5}); }
at::Tensor contiguous() { return ascending(); }
at::Tensor channels_last() { return ascending().contiguous(at::MemoryFormat::ChannelsLast); }
at::Tensor transposed() { return ascending().reshape({12, 10}).t().contiguous().t(); }
at::Tensor slice() {
  at::Tensor big = at::full({12, 30}, -1.0f);
  at::Tensor part = big.slice(1, 10, 20);
  part.copy_(ascending().reshape({12, 10}));
  return part;
}
at::Tensor bf16() { return ascending().to(at::kBFloat16); }
at::Tensor f16() { return ascending().to(at::kHalf); }
at::Tensor f64() { return ascending().to(at::kDouble); }
at::Tensor scalar() { return at::zeros({}, at::kFloat); }
at::Tensor empty() { return at::zeros({0, 8}, at::kFloat); }

class TensorAccess : public ::testing::TestWithParam<Kind> {};

TEST_P(TensorAccess, ReadsLogicalOrder) {
  const auto values = values_of(GetParam().make());
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], static_cast<float>(i));
}

TEST_P(TensorAccess, DiffIsAnchorMinusLocal) {
  const at::Tensor tensor = GetParam().make();
  const auto numel = static_cast<std::size_t>(tensor.numel());
  std::vector<float> anchor(numel, 7.0f), out(numel, -99.0f);
  Scratch scratch;
  diff_tensor(tensor, anchor.data(), Codec::kF32, reinterpret_cast<std::byte*>(out.data()), &scratch);
  for (std::size_t i = 0; i < numel; ++i) EXPECT_EQ(out[i], 7.0f - static_cast<float>(i));
}

TEST_P(TensorAccess, AdoptWritesTheTensorItselfAndKeepsItsStrides) {
  const at::Tensor tensor = GetParam().make();
  const auto strides = tensor.strides().vec();
  const void* memory = tensor.data_ptr();
  const auto numel = static_cast<std::size_t>(tensor.numel());
  std::vector<float> next(numel), anchor(numel, 0.0f);
  for (std::size_t i = 0; i < numel; ++i) next[i] = static_cast<float>(i) * 2.0f;
  Scratch scratch;
  adopt_overwrite_tensor(tensor, next.data(), anchor.data(), &scratch);
  EXPECT_EQ(values_of(tensor), next);
  EXPECT_EQ(anchor, next);
  EXPECT_EQ(tensor.strides().vec(), strides);
  EXPECT_EQ(tensor.data_ptr(), memory);
}

TEST_P(TensorAccess, RebaseKeepsTheWorkThatWasNotMerged) {
  const at::Tensor tensor = GetParam().make();
  const auto numel = static_cast<std::size_t>(tensor.numel());
  std::vector<float> next(numel, 1.0f), anchor(numel, 0.5f), sent(numel, 0.25f);
  Scratch scratch;
  adopt_rebase_tensor(tensor, next.data(), sent.data(), anchor.data(), &scratch);
  const auto values = values_of(tensor);
  for (std::size_t i = 0; i < numel; ++i) {
    const float wanted = 1.0f + (static_cast<float>(i) - 0.5f) + 0.25f;
    EXPECT_NEAR(values[i], wanted, std::abs(wanted) * 0.008f);  // bf16 has 8 bits
    EXPECT_EQ(anchor[i], 1.0f);
  }
}

TEST_P(TensorAccess, BlendMixesLocalAndNext) {
  const at::Tensor tensor = GetParam().make();
  const auto numel = static_cast<std::size_t>(tensor.numel());
  std::vector<float> next(numel, 8.0f), anchor(numel, 0.0f);
  Scratch scratch;
  adopt_blend_tensor(tensor, next.data(), 0.5f, anchor.data(), &scratch);
  const auto values = values_of(tensor);
  for (std::size_t i = 0; i < numel; ++i) EXPECT_EQ(values[i], 4.0f + static_cast<float>(i) * 0.5f);
}

INSTANTIATE_TEST_SUITE_P(Kinds, TensorAccess,
                         ::testing::Values(Kind{"contiguous", contiguous}, Kind{"channels_last", channels_last},
                                           Kind{"transposed", transposed}, Kind{"slice", slice}, Kind{"bf16", bf16},
                                           Kind{"f16", f16}, Kind{"f64", f64}, Kind{"scalar", scalar},
                                           Kind{"empty", empty}),
                         [](const auto& info) { return std::string(info.param.name); });

// F028: neighbours of a slice in the same storage stay as they are.
TEST(TensorAccessNeighbours, AreLeftAlone) {
  at::Tensor big = at::full({12, 30}, -1.0f);
  const at::Tensor part = big.slice(1, 10, 20);
  std::vector<float> next(120, 3.0f), anchor(120);
  Scratch scratch;
  adopt_overwrite_tensor(part, next.data(), anchor.data(), &scratch);
  EXPECT_TRUE(at::all(part == 3.0f).item<bool>());
  EXPECT_TRUE(at::all(big.slice(1, 0, 10) == -1.0f).item<bool>());
  EXPECT_TRUE(at::all(big.slice(1, 20, 30) == -1.0f).item<bool>());
}

TEST(TensorAccessLeaf, MayRequireGrad) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    at::Tensor leaf = at::zeros({3}, dtype).requires_grad_(true);
    std::vector<float> next(3, 2.0f), anchor(3);
    Scratch scratch;
    adopt_overwrite_tensor(leaf, next.data(), anchor.data(), &scratch);
    EXPECT_TRUE(leaf.is_leaf());
    EXPECT_FALSE(leaf.grad_fn());
    EXPECT_EQ(values_of(leaf), next);
  }
}

TEST(TensorAccessDtype, RefusesWhatCannotTravelByName) {
  EXPECT_EQ(dtype_of(at::zeros({1}, at::kHalf), "w"), Dtype::kF16);
  try {
    dtype_of(at::zeros({1}, at::kComplexFloat), "spectral.weight");
    FAIL() << "expected a ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("spectral.weight"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace diloco
