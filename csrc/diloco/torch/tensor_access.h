// One parameter tensor seen as a row of f32 values in logical (row-major) order, whatever its dtype, strides or device.
// That order is the one on the wire, so a channels_last learner and a contiguous one agree, and strides are kept.
//
// Functions write into the tensor itself, never into a copy of it, and record no gradient. Contiguous f32 tensors on
// the CPU go to the kernels directly; everything else passes through `scratch`. The GIL need not be held.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "diloco/fragment/layout.h"
#include "diloco/fragment/plan.h"

namespace diloco {

// The layout's element type. Throws ConfigError naming the parameter if it is not a real floating type we carry.
Dtype dtype_of(const at::Tensor& tensor, const std::string& name);

// Work space for tensors that cannot be handed to a kernel in place; grows to the largest one and stays.
using Scratch = std::vector<float>;

// Pointer to the values as contiguous f32: the tensor's own memory if it is that already, else a copy in `scratch`.
// Valid until the tensor or the scratch is next touched.
float* as_f32(const at::Tensor& tensor, Scratch* scratch);
// tensor <- values, rounded to its dtype. `values` may be what as_f32() returned; then nothing is copied in place.
void store_f32(const at::Tensor& tensor, const float* values);

void read_tensor(const at::Tensor& tensor, float* out);
// out <- encode(anchor - tensor).
void diff_tensor(const at::Tensor& tensor, const float* anchor, Codec codec, std::byte* out, Scratch* scratch);
// See kernels.h adopt_*: tensor <- formula(next, tensor, anchor, sent); anchor <- next.
void adopt_overwrite_tensor(const at::Tensor& tensor, const float* next, float* anchor, Scratch* scratch);
void adopt_blend_tensor(const at::Tensor& tensor, const float* next, float alpha, float* anchor, Scratch* scratch);
void adopt_rebase_tensor(const at::Tensor& tensor, const float* next, const float* sent, float* anchor,
                         Scratch* scratch);

}  // namespace diloco
