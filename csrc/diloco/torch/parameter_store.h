// ParameterStore over torch tensors. Holds the Parameter objects, not their memory: every call fetches pointers anew,
// so `p.data = ...`, reallocation and in-place loads are followed. A parameter whose shape or dtype has changed since
// is refused with ConfigError. Training thread only; the GIL need not be held.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "diloco/learner/parameter_store.h"
#include "diloco/torch/tensor_access.h"

namespace diloco {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  std::vector<std::string> aliases;  // other names of the same tensor
};

class TorchParameterStore final : public ParameterStore {
 public:
  // Throws ConfigError for a dtype that cannot travel, and for what check_layout refuses.
  explicit TorchParameterStore(std::vector<NamedParameter> parameters);

  // Further ones, behind those there are. Throws as the constructor, and then nothing has changed.
  void append(std::vector<NamedParameter> parameters);

  const Layout& layout() const override { return layout_; }
  void read(std::uint32_t tensor, float* out) override;
  void diff(std::uint32_t tensor, const float* anchor, Codec codec, std::byte* out) override;
  void adopt_overwrite(std::uint32_t tensor, const float* next, float* anchor) override;
  void adopt_blend(std::uint32_t tensor, const float* next, float alpha, float* anchor) override;
  void adopt_rebase(std::uint32_t tensor, const float* next, const float* sent, float* anchor) override;

 private:
  const at::Tensor& checked(std::uint32_t tensor) const;

  std::vector<at::Tensor> tensors_;
  Layout layout_;
  Scratch scratch_;
};

}  // namespace diloco
