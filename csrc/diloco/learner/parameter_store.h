// What the learner shell needs from whoever holds the parameters. torch/ implements it over at::Tensor, the tests over
// plain arrays. All calls come from the training thread.
#pragma once

#include <memory>

#include "diloco/base/types.h"
#include "diloco/fragment/layout.h"
#include "diloco/fragment/plan.h"

namespace diloco {

class ParameterStore {
 public:
  virtual ~ParameterStore() = default;
  // Tensors by their index in layout(): the order the user registered them. Pointers are fetched anew on every call.
  virtual const Layout& layout() const = 0;
  // out[0, numel) <- the tensor's values as f32, logical (row-major) order.
  virtual void read(std::uint32_t tensor, float* out) = 0;
  // out <- encode(anchor - local).
  virtual void diff(std::uint32_t tensor, const float* anchor, Codec codec, std::byte* out) = 0;
  // local <- next + beta-formula; anchor <- next. `sent` may be null. See kernels.h adopt_*.
  virtual void adopt_overwrite(std::uint32_t tensor, const float* next, float* anchor) = 0;
  virtual void adopt_blend(std::uint32_t tensor, const float* next, float alpha, float* anchor) = 0;
  virtual void adopt_rebase(std::uint32_t tensor, const float* next, const float* sent, float* anchor) = 0;
};

}  // namespace diloco
