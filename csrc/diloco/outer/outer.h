// Outer optimizers, one step on one fragment, f32 state per fragment. g is the merged outer gradient, something to
// subtract; t counts the outer steps already made on the fragment.
//   sgd:              theta <- theta - lr*g
//   nesterov:         buf <- mu*buf + g; theta <- theta - lr*(g + mu*buf)            (torch.optim.SGD, dampening 0)
//   adam:             torch.optim.Adam with betas (mu, beta2), no weight decay        (tried in DiLoCo, section 3.2)
//   delayed_nesterov: every N-th step m <- mu*m + sum/N, theta <- theta - lr*((1 - c*N + c)*mu*m + g/N), sum <- 0;
//                     between them theta <- theta - lr*(c*mu*m + g/N)                 (Async Local-SGD, Algorithm 3)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "diloco/base/settings.h"

namespace diloco {

struct OuterOptions {
  OuterKind kind = OuterKind::kSgd;
  float lr = 1.0f;
  float momentum = 0.0f;
  float beta2 = 0.95f;
  float epsilon = 0.1f;
  std::uint32_t delay = 1;
  float delay_c = 0.0f;
};
OuterOptions outer_options(const Settings& settings);

// Arrays of state per fragment: sgd 0, nesterov 1 (buf), adam 2 (first, second moment), delayed_nesterov 2 (m, sum).
std::uint64_t outer_state_floats(const OuterOptions& options);

// A part of a fragment's state arrays, which lie one after the other: the second starts `stride` elements after the first.
template <class T>
struct OuterState {
  T* values = nullptr;  // null if there is no state
  std::uint64_t stride = 0;
  T* first() const { return values; }
  T* second() const { return values + stride; }
};

// `step` = t. All arrays have n elements; theta and state are read from *_in and written to *_out, which may alias their
// inputs. State is zero at first.
void outer_step(const OuterOptions& options, std::uint64_t step, const float* gradient, const float* theta_in,
                OuterState<const float> state_in, float* theta_out, OuterState<float> state_out, std::uint64_t n);

// How far theta moves per outer step, in units of a constant gradient: in the first one, and on average in the long run.
// Adam's step does not grow with the gradient: both are 0.
struct OuterGain {
  double first = 0.0;
  double long_run = 0.0;
};
OuterGain outer_gain(const OuterOptions& options);

// Combinations that are known to overshoot, one sentence each.
std::vector<std::string> outer_warnings(const Settings& settings);

}  // namespace diloco
