// What every operator asks of its arguments, each with words. ValueError in Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace diloco::ops {

inline void check_same_length(const char* op, const char* first, std::size_t expected, const char* second,
                              std::size_t got) {
  TORCH_CHECK_VALUE(expected == got, op, ": expected as many ", second, " as ", first, " (", expected, "), got ", got);
}

// A dense f32 array of `numel` values on the CPU that a kernel can use in place.
inline void check_dense_f32(const char* op, const char* what, const at::Tensor& tensor, std::int64_t numel) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kFloat && tensor.is_cpu() && tensor.is_contiguous(), op, ": expected ",
                    what, " to be contiguous float32 on the CPU, got ", tensor.toString(), " with strides ",
                    tensor.strides(), "; call .float().contiguous() first");
  TORCH_CHECK_VALUE(tensor.numel() == numel, op, ": expected ", numel, " values in ", what, ", got ", tensor.numel());
}

}  // namespace diloco::ops
