#include "diloco/outer/outer.h"

#include <cmath>

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

struct AdamFactors {
  float beta1, beta2, step_size, root_correction, epsilon;
};

DILOCO_CLONES
void adam_step(const AdamFactors& f, const float* gradient, const float* theta_in, const float* first_in,
               const float* second_in, float* theta_out, float* first_out, float* second_out, std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) {
    const float g = gradient[i];
    const float first = f.beta1 * first_in[i] + (1.0f - f.beta1) * g;
    const float second = f.beta2 * second_in[i] + (1.0f - f.beta2) * (g * g);
    theta_out[i] = theta_in[i] - f.step_size * (first / (std::sqrt(second) / f.root_correction + f.epsilon));
    first_out[i] = first;
    second_out[i] = second;
  }
}

// Between two updates of the momentum.
DILOCO_CLONES
void delayed_step(float lr, float share, float of_momentum, const float* gradient, const float* theta_in,
                  const float* momentum_in, const float* sum_in, float* theta_out, float* momentum_out, float* sum_out,
                  std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) {
    theta_out[i] = theta_in[i] - lr * (of_momentum * momentum_in[i] + share * gradient[i]);
    momentum_out[i] = momentum_in[i];
    sum_out[i] = sum_in[i] + gradient[i];
  }
}

DILOCO_CLONES
void delayed_update(float lr, float share, float mu, float of_momentum, const float* gradient, const float* theta_in,
                    const float* momentum_in, const float* sum_in, float* theta_out, float* momentum_out, float* sum_out,
                    std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) {
    const float momentum = mu * momentum_in[i] + share * (sum_in[i] + gradient[i]);
    theta_out[i] = theta_in[i] - lr * (of_momentum * momentum + share * gradient[i]);
    momentum_out[i] = momentum;
    sum_out[i] = 0.0f;
  }
}

AdamFactors adam_factors(const OuterOptions& o, std::uint64_t step) {
  const auto t = static_cast<double>(step + 1);
  return {o.momentum, o.beta2, static_cast<float>(o.lr / (1.0 - std::pow(o.momentum, t))),
          static_cast<float>(std::sqrt(1.0 - std::pow(o.beta2, t))), o.epsilon};
}

}  // namespace

OuterOptions outer_options(const Settings& s) {
  return {s.outer_optimizer,
          static_cast<float>(s.outer_lr),
          static_cast<float>(s.outer_momentum),
          static_cast<float>(s.outer_beta2),
          static_cast<float>(s.outer_epsilon),
          s.outer_delay,
          static_cast<float>(s.outer_delay_c)};
}

std::uint64_t outer_state_floats(const OuterOptions& options) {
  switch (options.kind) {
    case OuterKind::kSgd: return 0;
    case OuterKind::kNesterov: return 1;
    case OuterKind::kAdam:
    case OuterKind::kDelayedNesterov: break;
  }
  return 2;
}

void outer_step(const OuterOptions& options, std::uint64_t step, const float* gradient, const float* theta_in,
                OuterState<const float> state_in, float* theta_out, OuterState<float> state_out, std::uint64_t n) {
  switch (options.kind) {
    case OuterKind::kSgd: return sgd_step(options.lr, gradient, theta_in, theta_out, n);
    case OuterKind::kNesterov:
      return nesterov_step(options.lr, options.momentum, gradient, theta_in, state_in.first(), theta_out,
                           state_out.first(), n);
    case OuterKind::kAdam:
      return adam_step(adam_factors(options, step), gradient, theta_in, state_in.first(), state_in.second(), theta_out,
                       state_out.first(), state_out.second(), n);
    case OuterKind::kDelayedNesterov: break;
  }
  const auto every = static_cast<float>(options.delay);
  const float share = 1.0f / every;
  if ((step + 1) % options.delay == 0) {
    const float of_momentum = (1.0f - options.delay_c * every + options.delay_c) * options.momentum;
    return delayed_update(options.lr, share, options.momentum, of_momentum, gradient, theta_in, state_in.first(),
                          state_in.second(), theta_out, state_out.first(), state_out.second(), n);
  }
  delayed_step(options.lr, share, options.delay_c * options.momentum, gradient, theta_in, state_in.first(),
               state_in.second(), theta_out, state_out.first(), state_out.second(), n);
}

}  // namespace diloco
