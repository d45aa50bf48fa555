// Who counts, when a round may open, how long it waits: pure functions of state and time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "diloco/base/settings.h"
#include "diloco/base/types.h"
#include "diloco/fragment/schedule.h"

namespace diloco {

// One learner as the quorum sees it.
struct LearnerPace {
  Clock clock = 0;
  Seconds step_s = 0.0;  // moving average of its step; 0 = not known yet
};

// The syncer's clock T_K: the K-th largest clock among live, unstalled learners. nullopt if there are fewer than K.
// It says when a round opens; it never says who may contribute.
std::optional<Clock> quorum_clock(std::vector<LearnerPace> pace, std::uint32_t quorum);
// xi_step: step time of the K-th fastest among them whose step time is known; 0 if fewer than K are known.
Seconds quorum_step_s(std::vector<LearnerPace> pace, std::uint32_t quorum);

// A live learner is stalled when it has made no step for this long.
Seconds stall_after_s(Seconds step_s);

// Adaptive grace window (paper Eq. 3): gamma * max(0, tau * xi_step - (xi_quorum + xi_sync)), at most the cap
// (grace_cap_s, or one step). Without an estimate of the step the cap is used, or 0 if that is "one step" too.
struct GraceWindow {
  Seconds seconds = 0.0;
  bool capped = false;
};
GraceWindow grace_window(const Settings& settings, Seconds xi_step, Seconds xi_quorum, Seconds xi_sync);

// What an open round should do now.
struct RoundView {
  std::uint32_t quorum = 1;    // K, fixed at opening
  std::size_t complete = 0;    // contributions in the mailbox, finite and plausible
  std::size_t fresh = 0;       // of them, those that have arrived since the round opened
  std::size_t waited_for = 0;  // pulled, live, unstalled learners that have not delivered yet
  std::optional<TimePoint> deadline;  // end of grace, once the quorum is complete
  bool capped = false;
};
// K contributions are there, and K of them are fresh or nobody is asked any more. Those left over from an earlier round
// do not make a quorum while answers to this one are under way: with a short grace such rounds would close before anybody
// could join them, leave everybody to the next one, and go on alternating for ever.
bool has_quorum(const RoundView& round);
enum class RoundAction { kWait, kClose };
struct Decision {
  RoundAction action = RoundAction::kWait;
  std::string reason;  // of a close: all_present, grace_elapsed, cap, no_grace
};
Decision decide(const RoundView& round, const Settings& settings, TimePoint now);

// Open rounds at a time: settings.max_inflight, or ceil(P/H * round time / xi_step) + 1; in lockstep all that are due.
std::uint32_t inflight_limit(const Settings& settings, std::uint32_t num_fragments, Seconds round_s, Seconds xi_step);

}  // namespace diloco
