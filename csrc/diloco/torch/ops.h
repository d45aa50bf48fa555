// The dispatcher operators diloco::*, over tables of tensors, so that a CUDA backend is only a second registration.
// Schemas are in ops.cpp; these are the CPU bodies. No gradient formulas: everything runs under no_grad.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace diloco::ops {

// out[byte_offsets[i] ...] <- encode(anchors[i] - params[i]), as bf16 where bf16[i], else f32. `out` is 1-D uint8.
void fragment_diff(at::TensorList params, at::TensorList anchors, at::Tensor& out, at::IntArrayRef byte_offsets,
                   const c10::List<bool>& bf16);
// params[i] <- formula(next[i], params[i], anchors[i], sent[i]); anchors[i] <- next[i]. formula: "overwrite", "blend"
// (alpha = weight of the local value) or "rebase" (`sent` optional, f32, decoded).
void fragment_adopt(at::TensorList params, at::TensorList anchors, at::TensorList next,
                    std::optional<at::TensorList> sent, std::string_view formula, double alpha);
// Merge of one tensor's deltas with normalised weights: weighted mean, and Radial-Directional Averaging.
at::Tensor mean_merge(at::TensorList deltas, const at::Tensor& weights);
at::Tensor rda_merge(at::TensorList deltas, const at::Tensor& weights);
// theta <- outer optimizer on `gradient`. `settings`: those that begin with outer_, by name, separated by blanks:
// "outer_optimizer=nesterov outer_lr=0.7 outer_momentum=0.9". `step`: outer steps already made. `state`: f32, zero at
// first, as large as theta (nesterov) or twice as large (adam, delayed_nesterov); none for sgd.
void outer_step(const at::Tensor& gradient, at::Tensor& theta, const std::optional<at::Tensor>& state,
                std::string_view settings, std::int64_t step);

}  // namespace diloco::ops
