// A parameter store over plain arrays, for tests without torch.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "diloco/kernels/kernels.h"
#include "diloco/learner/parameter_store.h"

namespace diloco::testing {

struct NamedShape {
  std::string name;
  std::vector<std::int64_t> shape;
};

class ArrayStore : public ParameterStore {
 public:
  explicit ArrayStore(const std::vector<NamedShape>& shapes, float value = 0.0f) { append(shapes, value); }
  void append(const std::vector<NamedShape>& shapes, float value = 0.0f) {
    for (const NamedShape& shape : shapes) {
      TensorSpec spec;
      spec.name = shape.name;
      spec.shape = shape.shape;
      values.emplace_back(spec.numel(), value);
      layout_.tensors.push_back(std::move(spec));
    }
  }

  const Layout& layout() const override { return layout_; }
  void read(std::uint32_t tensor, float* out) override {
    for (std::size_t i = 0; i < values[tensor].size(); ++i) out[i] = values[tensor][i];
  }
  void diff(std::uint32_t tensor, const float* anchor, Codec codec, std::byte* out) override {
    const auto& local = values[tensor];
    if (codec == Codec::kF32) {
      kernels::fragment_diff_f32(anchor, local.data(), local.size(), out);
    } else {
      kernels::fragment_diff_bf16(anchor, local.data(), local.size(), out);
    }
  }
  void adopt_overwrite(std::uint32_t tensor, const float* next, float* anchor) override {
    kernels::adopt_overwrite(next, anchor, values[tensor].data(), values[tensor].size());
  }
  void adopt_blend(std::uint32_t tensor, const float* next, float alpha, float* anchor) override {
    kernels::adopt_blend(next, alpha, anchor, values[tensor].data(), values[tensor].size());
  }
  void adopt_rebase(std::uint32_t tensor, const float* next, const float* sent, float* anchor) override {
    kernels::adopt_rebase(next, sent, anchor, values[tensor].data(), values[tensor].size());
  }

  std::vector<std::vector<float>> values;  // by index in layout(); the test's to change between calls

 private:
  Layout layout_;
};

}  // namespace diloco::testing
