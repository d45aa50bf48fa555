#include "diloco/torch/parameter_store.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "diloco/base/errors.h"

namespace diloco {
namespace {

TEST(TorchParameterStore, DescribesTheTensors) {
  TorchParameterStore store({{"w", at::zeros({2, 3}, at::kBFloat16), {"head"}}, {"scale", at::zeros({}), {}}});
  ASSERT_EQ(store.layout().tensors.size(), 2u);
  EXPECT_EQ(store.layout().tensors[0], (TensorSpec{"w", {2, 3}, Dtype::kBf16, {"head"}}));
  EXPECT_EQ(store.layout().tensors[1], (TensorSpec{"scale", {}, Dtype::kF32, {}}));
}

TEST(TorchParameterStore, FollowsReplacedMemory) {
  at::Tensor parameter = at::zeros({4}).requires_grad_(true);
  TorchParameterStore store({{"w", parameter, {}}});
  parameter.set_data(at::full({4}, 5.0f));
  std::vector<float> values(4);
  store.read(0, values.data());
  EXPECT_EQ(values, std::vector<float>(4, 5.0f));
  std::vector<float> next(4, 9.0f), anchor(4);
  store.adopt_overwrite(0, next.data(), anchor.data());
  EXPECT_TRUE(at::all(parameter == 9.0f).item<bool>());
}

TEST(TorchParameterStore, RefusesAParameterThatChangedItsShapeOrDtype) {
  at::Tensor parameter = at::zeros({4}).requires_grad_(true);
  TorchParameterStore store({{"layer.w", parameter, {}}});
  parameter.set_data(at::zeros({4}, at::kBFloat16));
  std::vector<float> values(4);
  try {
    store.read(0, values.data());
    FAIL() << "expected a ConfigError";
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("'layer.w' was float32 (4,)"), std::string::npos) << text;
    EXPECT_NE(text.find("bfloat16 (4,) now"), std::string::npos) << text;
  }
}

TEST(TorchParameterStore, RefusesNothingAndDuplicates) {
  EXPECT_THROW(TorchParameterStore({}), ConfigError);
  EXPECT_THROW(TorchParameterStore({{"w", at::zeros({1}), {}}, {"w", at::zeros({1}), {}}}), ConfigError);
}

}  // namespace
}  // namespace diloco
