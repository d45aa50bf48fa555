// A schema with a mistake ends the process when the library loads, so that this program starts at all is a test too.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include "diloco/torch/ops.h"

namespace diloco {
namespace {

TEST(Ops, AreRegisteredForTheCpu) {
  for (const char* name : {"fragment_diff", "fragment_adopt", "mean_merge", "rda_merge", "outer_step"}) {
    const auto handle = c10::Dispatcher::singleton().findSchema({std::string("diloco::") + name, ""});
    ASSERT_TRUE(handle.has_value()) << name;
    EXPECT_TRUE(handle->hasKernelForDispatchKey(c10::DispatchKey::CPU)) << name;
  }
}

TEST(Ops, DiffAndAdoptWorkOnTablesOfTensors) {
  std::vector<at::Tensor> params{at::full({2, 2}, 1.0f), at::full({3}, 2.0f, at::kBFloat16)};
  std::vector<at::Tensor> anchors{at::full({2, 2}, 4.0f), at::full({3}, 4.0f)};
  at::Tensor out = at::zeros({64 + 6}, at::kByte);
  ops::fragment_diff(params, anchors, out, {0, 64}, c10::List<bool>({false, true}));
  EXPECT_EQ(static_cast<const float*>(out.data_ptr())[3], 3.0f);
  EXPECT_EQ(out.slice(0, 64, 70).view(at::kBFloat16)[2].item<float>(), 2.0f);

  std::vector<at::Tensor> next{at::full({2, 2}, 8.0f), at::full({3}, 8.0f)};
  ops::fragment_adopt(params, anchors, next, std::nullopt, "overwrite", 0.0);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(at::all(params[i] == 8.0f).item<bool>());
    EXPECT_TRUE(at::equal(anchors[i], next[i]));
  }
}

// Decoupled DiLoCo, App. D.2, worked out by hand.
TEST(Ops, MergesGiveThePublishedValues) {
  const std::vector<at::Tensor> deltas{at::tensor({3.0f, 0.0f}), at::tensor({0.0f, 4.0f})};
  const auto weights = at::tensor({1.0, 3.0}, at::kDouble);
  const auto equal = at::tensor({1.0, 1.0}, at::kDouble);
  EXPECT_TRUE(at::allclose(ops::mean_merge(deltas, weights), at::tensor({0.75f, 3.0f}), 1e-6));
  EXPECT_TRUE(at::allclose(ops::rda_merge(deltas, equal), at::tensor({2.474874f, 2.474874f}), 1e-6));
  EXPECT_TRUE(at::allclose(ops::rda_merge(deltas, weights), at::tensor({1.185854f, 3.557562f}), 1e-6));
  EXPECT_TRUE(at::equal(ops::rda_merge({deltas[0]}, at::tensor({2.0}, at::kDouble)), deltas[0]));
}

TEST(Ops, OuterStepNeedsItsState) {
  at::Tensor theta = at::ones({3});
  EXPECT_THROW(ops::outer_step(at::ones({3}), theta, std::nullopt, "outer_optimizer=nesterov outer_momentum=0.9", 0), c10::ValueError);
  ops::outer_step(at::ones({3}), theta, std::nullopt, "outer_lr=0.5", 0);
  EXPECT_TRUE(at::all(theta == 0.5f).item<bool>());
}

TEST(Ops, RefuseWithWords) {
  std::vector<at::Tensor> params{at::zeros({4})}, wrong{at::zeros({5})};
  at::Tensor out = at::zeros({16}, at::kByte), small = at::zeros({8}, at::kByte);
  EXPECT_THROW(ops::fragment_diff(params, wrong, out, {0}, c10::List<bool>({false})), c10::ValueError);
  EXPECT_THROW(ops::fragment_diff(params, params, small, {0}, c10::List<bool>({false})), c10::ValueError);
  EXPECT_THROW(ops::fragment_diff(params, params, out, {-4}, c10::List<bool>({false})), c10::ValueError);
  EXPECT_THROW(ops::fragment_adopt(params, params, params, std::nullopt, "average", 0.0), c10::ValueError);
  EXPECT_THROW(ops::mean_merge({}, at::zeros({0}, at::kDouble)), c10::ValueError);
  EXPECT_THROW(ops::mean_merge(params, at::zeros({1}, at::kDouble)), c10::ValueError);
  EXPECT_THROW(ops::mean_merge({at::full({1}, NAN)}, at::ones({1}, at::kDouble)), c10::ValueError);
}

}  // namespace
}  // namespace diloco
