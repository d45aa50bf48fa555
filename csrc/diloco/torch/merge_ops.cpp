#include <ATen/ops/empty.h>

#include <cmath>
#include <sstream>
#include <vector>

#include "diloco/base/errors.h"
#include "diloco/base/settings.h"
#include "diloco/kernels/kernels.h"
#include "diloco/merge/segment_merge.h"
#include "diloco/outer/outer.h"
#include "diloco/torch/checks.h"
#include "diloco/torch/ops.h"

namespace diloco::ops {
namespace {

std::vector<SegmentMember> members_of(const char* op, at::TensorList deltas, const at::Tensor& weights) {
  TORCH_CHECK_VALUE(!deltas.empty(), op, ": expected at least one delta, got none");
  TORCH_CHECK_VALUE(weights.dim() == 1 && weights.scalar_type() == at::kDouble && weights.is_cpu() &&
                        weights.is_contiguous(),
                    op, ": expected weights to be a contiguous 1-D float64 tensor on the CPU, got ",
                    weights.toString(), " ", weights.sizes());
  check_same_length(op, "deltas", deltas.size(), "weights", static_cast<std::size_t>(weights.numel()));
  const auto* raw = static_cast<const double*>(weights.data_ptr());
  double total = 0.0;
  for (std::size_t i = 0; i < deltas.size(); ++i) {
    TORCH_CHECK_VALUE(std::isfinite(raw[i]) && raw[i] >= 0.0, op, ": expected weights >= 0, number ", i, " is ",
                      raw[i]);
    total += raw[i];
  }
  TORCH_CHECK_VALUE(total > 0.0, op, ": expected a positive weight, all are 0");

  std::vector<SegmentMember> members;
  for (std::size_t i = 0; i < deltas.size(); ++i) {
    TORCH_CHECK_VALUE(deltas[i].sizes() == deltas[0].sizes(), op, ": expected delta ", i, " to have shape ",
                      deltas[0].sizes(), ", got ", deltas[i].sizes());
    check_dense_f32(op, "deltas", deltas[i], deltas[0].numel());
    const auto* payload = static_cast<const std::byte*>(deltas[i].data_ptr());
    bool finite = true;
    const double norm =
        std::sqrt(kernels::norm_squared(payload, false, static_cast<std::uint64_t>(deltas[i].numel()), &finite));
    TORCH_CHECK_VALUE(finite, op, ": expected finite deltas, number ", i, " has infinities or NaN");
    if (raw[i] > 0.0) members.push_back({Codec::kF32, payload, raw[i] / total, norm});
  }
  return members;
}

// "outer_optimizer=nesterov outer_lr=0.7 outer_momentum=0.9": the settings by their names.
OuterOptions options_from(const char* op, std::string_view text) {
  Settings settings;
  try {
    std::istringstream words{std::string(text)};
    for (std::string word; words >> word;) {
      const std::size_t equals = std::min(word.find('='), word.size());
      const std::string name = word.substr(0, equals);
      TORCH_CHECK_VALUE(name.starts_with("outer_") && equals < word.size(), op,
                        ": expected settings like \"outer_optimizer=nesterov outer_lr=0.7\", got \"", word, "\"");
      settings.set(name, word.substr(equals + 1));
    }
    settings.validate();
  } catch (const ConfigError& error) {
    TORCH_CHECK_VALUE(false, op, ": ", error.what());
  }
  return outer_options(settings);
}

}  // namespace

at::Tensor mean_merge(at::TensorList deltas, const at::Tensor& weights) {
  const auto members = members_of("mean_merge", deltas, weights);
  at::Tensor merged = at::empty(deltas[0].sizes(), deltas[0].options());
  diloco::mean_merge(members, static_cast<std::uint64_t>(merged.numel()),
                     static_cast<float*>(merged.data_ptr()));
  return merged;
}

at::Tensor rda_merge(at::TensorList deltas, const at::Tensor& weights) {
  const auto members = members_of("rda_merge", deltas, weights);
  at::Tensor merged = at::empty(deltas[0].sizes(), deltas[0].options());
  diloco::rda_merge(members, static_cast<std::uint64_t>(merged.numel()),
                    static_cast<float*>(merged.data_ptr()));
  return merged;
}

void outer_step(const at::Tensor& gradient, at::Tensor& theta, const std::optional<at::Tensor>& state,
                std::string_view settings, std::int64_t step) {
  const char* op = "outer_step";
  const OuterOptions options = options_from(op, settings);
  const std::int64_t numel = theta.numel();
  TORCH_CHECK_VALUE(step >= 0, op, ": expected step >= 0, the outer steps already made, got ", step);
  check_dense_f32(op, "theta", theta, numel);
  check_dense_f32(op, "gradient", gradient, numel);
  OuterState<float> buffers{nullptr, static_cast<std::uint64_t>(numel)};
  if (const auto floats = static_cast<std::int64_t>(outer_state_floats(options)); floats > 0) {
    TORCH_CHECK_VALUE(state.has_value(), op, ": this optimizer needs `state`, ", floats, " times theta in zeros at first");
    check_dense_f32(op, "state", *state, floats * numel);
    buffers.values = static_cast<float*>(state->data_ptr());
  }
  auto* values = static_cast<float*>(theta.data_ptr());
  diloco::outer_step(options, static_cast<std::uint64_t>(step), static_cast<const float*>(gradient.data_ptr()), values,
                     {buffers.values, buffers.stride}, values, buffers, static_cast<std::uint64_t>(numel));
}

}  // namespace diloco::ops
