#include "diloco/torch/tensor_access.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include "diloco/base/errors.h"
#include "diloco/kernels/kernels.h"

namespace diloco {
namespace {

bool kernels_can_use(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_neg();
}

at::Tensor view_of(const float* values, const at::Tensor& like) {
  return at::from_blob(const_cast<float*>(values), like.sizes(), at::TensorOptions().dtype(at::kFloat));
}

template <typename Adopt>
void adopt_through_f32(const at::Tensor& tensor, Scratch* scratch, Adopt adopt) {
  float* local = as_f32(tensor, scratch);
  adopt(local, static_cast<std::uint64_t>(tensor.numel()));
  store_f32(tensor, local);
}

}  // namespace

Dtype dtype_of(const at::Tensor& tensor, const std::string& name) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Dtype::kF32;
    case at::kBFloat16: return Dtype::kBf16;
    case at::kHalf: return Dtype::kF16;
    case at::kDouble: return Dtype::kF64;
    default:
      throw ConfigError("parameter '" + name + "' has dtype " + c10::toString(tensor.scalar_type()) +
                        "; expected float32, bfloat16, float16 or float64. Leave it out of the optimizer, or freeze it.");
  }
}

float* as_f32(const at::Tensor& tensor, Scratch* scratch) {
  if (tensor.numel() == 0) return nullptr;
  if (kernels_can_use(tensor)) return static_cast<float*>(tensor.data_ptr());
  const auto numel = static_cast<std::size_t>(tensor.numel());
  if (scratch->size() < numel) scratch->resize(numel);
  const at::NoGradGuard no_grad;
  view_of(scratch->data(), tensor).copy_(tensor);
  return scratch->data();
}

void store_f32(const at::Tensor& tensor, const float* values) {
  if (tensor.numel() == 0) return;
  if (kernels_can_use(tensor) && tensor.data_ptr() == values) return;
  const at::NoGradGuard no_grad;
  tensor.copy_(view_of(values, tensor));
}

void read_tensor(const at::Tensor& tensor, float* out) {
  if (tensor.numel() == 0) return;
  const at::NoGradGuard no_grad;
  view_of(out, tensor).copy_(tensor);
}

void diff_tensor(const at::Tensor& tensor, const float* anchor, Codec codec, std::byte* out, Scratch* scratch) {
  const float* local = as_f32(tensor, scratch);
  const auto numel = static_cast<std::uint64_t>(tensor.numel());
  if (codec == Codec::kBf16) {
    kernels::fragment_diff_bf16(anchor, local, numel, out);
  } else {
    kernels::fragment_diff_f32(anchor, local, numel, out);
  }
}

void adopt_overwrite_tensor(const at::Tensor& tensor, const float* next, float* anchor, Scratch* scratch) {
  adopt_through_f32(tensor, scratch, [&](float* local, std::uint64_t n) {
    kernels::adopt_overwrite(next, anchor, local, n);
  });
}

void adopt_blend_tensor(const at::Tensor& tensor, const float* next, float alpha, float* anchor, Scratch* scratch) {
  adopt_through_f32(tensor, scratch, [&](float* local, std::uint64_t n) {
    kernels::adopt_blend(next, alpha, anchor, local, n);
  });
}

void adopt_rebase_tensor(const at::Tensor& tensor, const float* next, const float* sent, float* anchor,
                         Scratch* scratch) {
  adopt_through_f32(tensor, scratch, [&](float* local, std::uint64_t n) {
    kernels::adopt_rebase(next, sent, anchor, local, n);
  });
}

}  // namespace diloco
