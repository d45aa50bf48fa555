#include "diloco/core/memory_budget.h"

#include <algorithm>

#include "diloco/merge/merge.h"

namespace diloco {

LearnerBudget learner_budget(const Layout& layout, const Plan& plan, const Settings& settings,
                             std::uint64_t staging_bytes) {
  constexpr std::uint64_t kUsual = 3, kMost = 6;
  LearnerBudget out;
  out.anchors = layout.numel() * sizeof(float);
  std::uint64_t up = 0, down = 0, largest_down = 0, largest_tensor = 0;
  bool f32 = true;
  for (FragmentId p = 0; p < plan.size(); ++p) {
    const auto contribution = payload_layout(layout, plan, p, PayloadKind::kContribution, settings);
    const auto image = payload_layout(layout, plan, p, PayloadKind::kImage, settings);
    up += contribution.bytes;
    down += image.bytes;
    largest_down = std::max(largest_down, image.bytes);
    for (const auto* payload : {&contribution, &image}) {
      for (const auto& segment : payload->segments) {
        f32 = f32 && segment.codec == Codec::kF32;
        largest_tensor = std::max(largest_tensor, segment.numel);
      }
    }
  }
  const auto bounded = [&](std::uint64_t bytes) { return staging_bytes > 0 ? std::min(bytes, staging_bytes) : bytes; };
  out.copies = bounded(kUsual * up);
  out.copies_most = bounded(kMost * up);
  out.arriving = down + largest_down;
  out.wire = settings.credit_window_bytes;
  out.scratch = f32 ? 0 : 2 * largest_tensor * sizeof(float);
  return out;
}

SyncerBudget syncer_budget(const Layout& layout, const Plan& plan, const Settings& settings, std::size_t learners) {
  SyncerBudget out;
  const std::uint64_t floats = 1 + outer_state_floats(outer_options(settings));
  std::uint64_t up = 0, down = 0, largest_up = 0;
  for (FragmentId p = 0; p < plan.size(); ++p) {
    const std::uint64_t contribution = payload_layout(layout, plan, p, PayloadKind::kContribution, settings).bytes;
    const std::uint64_t image = payload_layout(layout, plan, p, PayloadKind::kImage, settings).bytes;
    const std::uint64_t state = floats * plan.fragments[p].numel * sizeof(float) + image;
    up += contribution;
    down += image;
    largest_up = std::max(largest_up, contribution);
    out.weights += state;
    out.merging = std::max(out.merging, state);
  }
  const bool lockstep = settings.mode == Mode::kLockstep;
  const std::uint64_t of = lockstep ? std::max<std::uint64_t>(learners, settings.min_quorum) : settings.min_quorum;
  out.least = of * largest_up;
  out.comfortable = 2 * learners * up + settings.min_quorum * largest_up;
  if (settings.anchor == Anchor::kSyncer) out.retained = settings.staleness_limit() * down;
  return out;
}

}  // namespace diloco
