// Outer optimizers, one step on one fragment, f32 state per fragment (paper section on OuterOpt; identical to
// torch.optim.SGD with nesterov and dampening 0): buf <- mu*buf + g; theta <- theta - lr*(g + mu*buf).
#pragma once

#include <cstdint>

#include "diloco/base/settings.h"

namespace diloco {

struct OuterOptions {
  OuterKind kind = OuterKind::kSgd;
  float lr = 1.0f;
  float momentum = 0.0f;
};
// `state` has outer_state_floats() * n values, zero at first; may be null when that is 0. All arrays have n elements;
// theta and state are read from *_in and written to *_out (which may alias their inputs).
std::uint64_t outer_state_floats(const OuterOptions& options);  // per element: 0 (sgd) or 1 (nesterov)
void outer_step(const OuterOptions& options, const float* gradient, const float* theta_in, const float* state_in,
                float* theta_out, float* state_out, std::uint64_t n);

}  // namespace diloco
