#include "diloco/quorum/quorum.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace diloco {

std::optional<Clock> quorum_clock(std::vector<LearnerPace> pace, std::uint32_t quorum) {
  if (quorum == 0 || pace.size() < quorum) return std::nullopt;
  const auto kth = pace.begin() + (quorum - 1);
  std::nth_element(pace.begin(), kth, pace.end(),
                   [](const LearnerPace& a, const LearnerPace& b) { return a.clock > b.clock; });
  return kth->clock;
}

Seconds quorum_step_s(std::vector<LearnerPace> pace, std::uint32_t quorum) {
  std::erase_if(pace, [](const LearnerPace& p) { return p.step_s <= 0.0; });
  if (quorum == 0 || pace.size() < quorum) return 0.0;
  const auto kth = pace.begin() + (quorum - 1);
  std::nth_element(pace.begin(), kth, pace.end(),
                   [](const LearnerPace& a, const LearnerPace& b) { return a.step_s < b.step_s; });
  return kth->step_s;
}

Seconds stall_after_s(Seconds step_s) { return std::max(5.0 * step_s, 2.0); }

GraceWindow grace_window(const Settings& settings, Seconds xi_step, Seconds xi_quorum, Seconds xi_sync) {
  if (settings.grace == Grace::kNone) return {};
  if (settings.grace == Grace::kFixed) return {settings.grace_s, false};
  const Seconds cap = settings.grace_cap_s > 0.0 ? settings.grace_cap_s : xi_step;
  if (xi_step <= 0.0) return {cap, true};
  const Seconds slack = settings.overlap_steps * xi_step - (xi_quorum + xi_sync);
  const Seconds window = settings.grace_gamma * std::max(0.0, slack);
  return window > cap ? GraceWindow{cap, true} : GraceWindow{window, false};
}

bool has_quorum(const RoundView& round) {
  return round.complete >= round.quorum && (round.fresh >= round.quorum || round.waited_for == 0);
}

Decision decide(const RoundView& round, const Settings& settings, TimePoint now) {
  if (!has_quorum(round)) return {};
  if (round.waited_for == 0) return {RoundAction::kClose, "all_present"};
  if (settings.mode == Mode::kLockstep) return {};  // lockstep waits for everybody
  if (settings.grace == Grace::kNone) return {RoundAction::kClose, "no_grace"};
  if (round.deadline && now >= *round.deadline) {
    return {RoundAction::kClose, round.capped ? "cap" : "grace_elapsed"};
  }
  return {};
}

std::uint32_t inflight_limit(const Settings& settings, std::uint32_t num_fragments, Seconds round_s, Seconds xi_step) {
  if (settings.max_inflight > 0) return settings.max_inflight;
  if (settings.mode == Mode::kLockstep) return std::max(1u, num_fragments);
  if (xi_step <= 0.0 || round_s <= 0.0) return 2;
  const double per_step = static_cast<double>(num_fragments) / settings.sync_every;
  const double wanted = std::ceil(per_step * round_s / xi_step) + 1.0;
  return static_cast<std::uint32_t>(std::clamp(wanted, 1.0, static_cast<double>(std::max(1u, num_fragments))));
}

}  // namespace diloco
