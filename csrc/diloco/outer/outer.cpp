#include "diloco/outer/outer.h"

#include "diloco/kernels/clones.h"

namespace diloco {
namespace {

DILOCO_CLONES
void sgd_step(float lr, const float* gradient, const float* theta_in, float* theta_out, std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) theta_out[i] = theta_in[i] - lr * gradient[i];
}

DILOCO_CLONES
void nesterov_step(float lr, float mu, const float* gradient, const float* theta_in, const float* state_in,
                   float* theta_out, float* state_out, std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) {
    const float momentum = mu * state_in[i] + gradient[i];
    const float direction = gradient[i] + mu * momentum;
    theta_out[i] = theta_in[i] - lr * direction;
    state_out[i] = momentum;
  }
}

}  // namespace

std::uint64_t outer_state_floats(const OuterOptions& options) { return options.kind == OuterKind::kNesterov ? 1 : 0; }

void outer_step(const OuterOptions& options, const float* gradient, const float* theta_in, const float* state_in,
                float* theta_out, float* state_out, std::uint64_t n) {
  if (options.kind == OuterKind::kNesterov) {
    nesterov_step(options.lr, options.momentum, gradient, theta_in, state_in, theta_out, state_out, n);
  } else {
    sgd_step(options.lr, gradient, theta_in, theta_out, n);
  }
}

}  // namespace diloco
