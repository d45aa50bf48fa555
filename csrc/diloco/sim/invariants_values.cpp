// finite, and with check_values: merge_value, displacement, adoption. The numbers once more, in double precision and by
// the formulas of docs/concepts.md.
#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "diloco/sim/invariants_impl.h"

namespace diloco::sim {

namespace {

constexpr float kHuge = 1e30f;
constexpr double kF32 = 0x1.0p-22;   // a few roundings of f32, relative
constexpr double kBf16 = 0x1.0p-7;   // one rounding of bf16, relative

double element(const Segment& segment, const std::byte* payload, std::uint64_t i) {
  std::uint32_t bits = 0;
  if (segment.codec == Codec::kBf16) {
    std::uint16_t half = 0;
    std::memcpy(&half, payload + segment.byte_offset + 2 * i, sizeof half);
    bits = static_cast<std::uint32_t>(half) << 16;
  } else {
    std::memcpy(&bits, payload + segment.byte_offset + 4 * i, sizeof bits);
  }
  float value = 0.0f;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A member's displacement on one tensor; against the present weights if it started from earlier ones.
std::vector<double> displacement(const MergeJob& job, const MergeMember& member, std::size_t s) {
  const Segment& segment = job.in.segments[s];
  std::vector<double> values(segment.numel);
  for (std::uint64_t i = 0; i < segment.numel; ++i) {
    values[i] = element(segment, member.payload->data(), i);
    if (!member.base_image) continue;
    values[i] += static_cast<double>(job.previous->theta->f32()[segment.element_offset + i]) -
                 element(job.out.segments[s], member.base_image->data(), i);
  }
  return values;
}

double length(const std::vector<double>& values) {
  double squared = 0.0;
  for (const double value : values) squared += value * value;
  return std::sqrt(squared);
}

bool averaged_by_name(const std::string& name) {  // the default of merge_overrides
  for (const char* part : {"embed", "wte", "wpe", "lm_head"}) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

// The merged displacement of one tensor, and the sum of the members' sizes: what errors are relative to.
struct Merged {
  std::vector<double> delta;
  double size = 0.0;
  bool certain = true;  // false: directions so close to cancelling that either rule may have been taken
};

Merged merge_tensor(const MergeJob& job, std::size_t s_index, bool rda, const std::vector<double>& weights) {
  const Segment& segment = job.in.segments[s_index];
  Merged out;
  out.delta.assign(segment.numel, 0.0);
  std::vector<double> mean(segment.numel, 0.0), direction(segment.numel, 0.0);
  double radius = 0.0, directed = 0.0;
  int members = 0;
  for (std::size_t m = 0; m < job.members.size(); ++m) {
    const std::vector<double> values = displacement(job, job.members[m], s_index);
    const double norm = length(values);
    out.size += weights[m] * norm;
    // Rounding of the weights it started from and of the present ones.
    for (std::uint64_t i = 0; job.members[m].base_image && i < segment.numel; ++i) {
      out.size += weights[m] * std::abs(static_cast<double>(job.previous->theta->f32()[segment.element_offset + i]));
    }
    if (weights[m] <= 0.0) continue;
    for (std::uint64_t i = 0; i < segment.numel; ++i) {
      const double value = values[i];
      mean[i] += weights[m] * value;
      if (norm > 0.0) direction[i] += weights[m] * value / norm;
    }
    if (norm == 0.0) continue;
    ++members;
    radius += weights[m] * norm;
    directed += weights[m];
  }
  double squared = 0.0;
  for (const double value : direction) squared += value * value;
  const double s = std::sqrt(squared);
  if (!rda || members < 2 || s < 1e-6 * directed) {
    out.delta = mean;
    out.certain = !rda || members < 2 || s < 0.5e-6 * directed;
    return out;
  }
  out.certain = s > 1e-3 * directed;
  for (std::uint64_t i = 0; i < segment.numel; ++i) out.delta[i] = radius * direction[i] / s;
  out.size *= directed / s;
  return out;
}

// What the outer optimizer makes of a merged displacement: the step to subtract, lr apart, and its next state. `size`:
// what errors are relative to.
struct Stepped {
  double step = 0.0, size = 0.0, state_size = 0.0;
  std::vector<double> state;
};

Stepped outer_step(const Settings& settings, const MergeJob& job, std::uint64_t at, double g, double size) {
  const auto state = [&](std::size_t k) { return static_cast<double>(job.previous->outer_state->f32()[k * job.in.numel + at]); };
  const double mu = settings.outer_momentum;
  const double t = static_cast<double>(job.previous->outer_steps) + 1.0;
  switch (settings.outer_optimizer) {
    case OuterKind::kSgd: return {g, size, 0.0, {}};
    case OuterKind::kNesterov: {
      const double momentum = mu * state(0) + g;
      const double most = size + std::abs(mu * state(0));
      return {g + mu * momentum, 2.0 * most, most, {momentum}};
    }
    case OuterKind::kAdam: {
      const double beta2 = settings.outer_beta2;
      const double first = mu * state(0) + (1.0 - mu) * g, second = beta2 * state(1) + (1.0 - beta2) * g * g;
      const double divisor = std::sqrt(second / (1.0 - std::pow(beta2, t))) + settings.outer_epsilon;
      const double most = size + std::abs(state(0));
      // The root of a small second moment multiplies its error; epsilon bounds that.
      return {first / (1.0 - std::pow(mu, t)) / divisor,
              most / (1.0 - std::pow(mu, t)) / settings.outer_epsilon * (1.0 + most / settings.outer_epsilon),
              most + size * size + std::abs(state(1)), {first, second}};
    }
    case OuterKind::kDelayedNesterov: {
      const double n = settings.outer_delay, c = settings.outer_delay_c;
      const double most = size + std::abs(state(0)) + std::abs(state(1));
      if (std::fmod(t, n) != 0.0) return {c * mu * state(0) + g / n, most, most, {state(0), state(1) + g}};
      const double momentum = mu * state(0) + (state(1) + g) / n;
      return {(1.0 - c * n + c) * mu * momentum + g / n, 2.0 * most, most, {momentum, 0.0}};
    }
  }
  return {};
}

}  // namespace

void ShardInvariants::Impl::check_merge(const MergeJob& job, const MergeResult& result, FragmentId p) {
  for (const auto& member : job.members) {
    for (std::size_t s = 0; s < job.in.segments.size(); ++s) {
      if (!std::isfinite(length(displacement(job, member, s)))) {
        fail("finite", fmt::format("a contribution of {} to fragment {} that is not finite is merged", member.learner, p));
      }
    }
  }
  if (!result.ok) return;
  const float* theta = result.next->theta->f32();
  for (std::uint64_t i = 0; i < job.in.numel; ++i) {
    if (!std::isfinite(theta[i])) return fail("finite", fmt::format("the weights of fragment {} are not finite", p));
    run.huge_values = run.huge_values || std::abs(theta[i]) > kHuge;  // an outer optimizer that overshoots gets there, too
  }
  if (!options.check_values) return;
  const std::vector<double>& weights = fragments[p].closing->weights;
  double total = 0.0;
  for (const double weight : weights) total += weight;
  if (total == 0.0 || weights.size() != job.members.size()) return;
  for (std::size_t s = 0; s < job.in.segments.size(); ++s) {
    const Segment& segment = job.in.segments[s];
    const TensorSpec& tensor = options.layout.tensors.at(segment.tensor);
    const bool rda = settings.merge == MergeKind::kRda && tensor.shape.size() >= 2 && !averaged_by_name(tensor.name);
    const Merged merged = merge_tensor(job, s, rda, weights);
    if (!merged.certain) continue;
    for (std::uint64_t i = 0; i < segment.numel; ++i) {
      const std::uint64_t at = segment.element_offset + i;
      const double before = job.previous->theta->f32()[at], after = theta[at];
      const Stepped stepped = outer_step(settings, job, at, merged.delta[i], merged.size);
      const double expected = before - settings.outer_lr * stepped.step;
      const double allowed = 16 * kF32 * (std::abs(before) + settings.outer_lr * 2.0 * stepped.size);
      if (std::abs(expected - after) > allowed) {
        return fail("merge_value", fmt::format("fragment {}: element {} becomes {}, it should become {}", p, at, after, expected));
      }
      for (std::size_t k = 0; k < stepped.state.size(); ++k) {
        const double state = result.next->outer_state->f32()[k * job.in.numel + at];
        if (std::abs(state - stepped.state[k]) > 64 * kF32 * stepped.state_size) {
          return fail("merge_value", fmt::format("fragment {}: the outer state of element {} is {}, it should be {}", p, at, state,
                                                 stepped.state[k]));
        }
      }
      const double image = element(job.out.segments[s], result.image.bytes->data(), i);
      const double rounding = job.out.segments[s].codec == Codec::kBf16 ? kBf16 : 0.0;
      if (std::abs(image - after) > rounding * std::abs(after) + 1e-37) {
        return fail("merge_value", fmt::format("fragment {}: element {} is published as {}, it is {}", p, at, image, after));
      }
    }
  }
}

void Invariants::staged(std::size_t learner, const Stage& stage, const PayloadLayout& layout, const Tensors& anchor,
                        const Tensors& local) {
  RunBooks& at = *run_;
  LifeBooks& life = *at.current[learner];
  Share& share = at.share(life, stage.fragment);
  const std::uint64_t made = life.tokens.back();
  // Staged again at the same boundary (lockstep): the last one counts.
  auto slot = std::find_if(share.staged.begin(), share.staged.end(), [&](const Copy& copy) { return copy.to == made; });
  if (slot == share.staged.end()) slot = share.staged.begin() + static_cast<std::ptrdiff_t>(share.next_staged++ % share.staged.size());
  *slot = {0, made, 0, life.clock, share.adopted, checksum(stage.out->bytes()), 0.0};
  if (!at.options.check_values) return;
  for (const Segment& segment : layout.segments) {
    for (std::uint64_t i = 0; i < segment.numel; ++i) {
      const double from = anchor[segment.tensor][i], to = local[segment.tensor][i], u = from - to;
      const double staged = element(segment, stage.out->data(), i);
      const double allowed = (segment.codec == Codec::kBf16 ? kBf16 : kF32) * std::abs(u) + kF32 * (std::abs(from) + std::abs(to));
      if (std::isfinite(u) && std::abs(u) < 1e38 && !(std::abs(staged - u) <= allowed)) {
        return at.fail("displacement", fmt::format("{} stages {} for an element of fragment {} that went from {} to {}",
                                                   life.id, staged, stage.fragment, from, to));
      }
    }
  }
}

void Invariants::before_adoption(const PayloadLayout& layout, const Tensors& anchor, const Tensors& local) {
  RunBooks& at = *run_;
  if (!at.options.check_values) return;
  at.anchor_before.resize(anchor.size());
  at.local_before.resize(local.size());
  for (const Segment& segment : layout.segments) {
    at.anchor_before[segment.tensor] = anchor[segment.tensor];
    at.local_before[segment.tensor] = local[segment.tensor];
  }
}

void Invariants::check_adoption(const AdoptFragment& adopt, const PayloadLayout& image, const PayloadLayout& contribution,
                                const Tensors& anchor, const Tensors& local) {
  RunBooks& at = *run_;
  if (!at.options.check_values) return;
  for (std::size_t s = 0; s < image.segments.size(); ++s) {
    const Segment& in = image.segments[s];
    for (std::uint64_t i = 0; i < in.numel; ++i) {
      const double anchor_before = at.anchor_before[in.tensor][i], local_before = at.local_before[in.tensor][i];
      const double next = adopt.image ? element(in, adopt.image->data(), i) : anchor_before;
      const double sent = adopt.sent ? element(contribution.segments[s], adopt.sent->data(), i) : 0.0;
      double expected = next, size = std::abs(next);
      if (adopt.formula == AdoptFormula::kBlend) {
        const double alpha = at.settings.blend_alpha;
        expected = alpha * local_before + (1.0 - alpha) * next;
        size += std::abs(local_before);
      } else if (adopt.formula == AdoptFormula::kRebase) {
        expected = next - ((anchor_before - local_before) - sent);
        size += std::abs(anchor_before) + std::abs(local_before) + std::abs(sent);
      }
      if (!std::isfinite(expected) || size > 1e37) continue;  // poisoned, and soon taken again
      if (!(std::abs(static_cast<double>(anchor[in.tensor][i]) - next) <= kF32 * std::abs(next)) ||
          !(std::abs(static_cast<double>(local[in.tensor][i]) - expected) <= 8 * kF32 * size)) {
        return at.fail("adoption", fmt::format("fragment {}: an element becomes {} by adoption (anchor {}), it should be {} ({})",
                                               adopt.fragment, local[in.tensor][i], anchor[in.tensor][i], expected, next));
      }
    }
  }
}

}  // namespace diloco::sim
