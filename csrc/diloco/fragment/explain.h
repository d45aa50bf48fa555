// What a plan means for the network: who travels when, and how far the load is from even.
#pragma once

#include <string>
#include <vector>

#include "diloco/base/settings.h"
#include "diloco/fragment/layout.h"
#include "diloco/fragment/plan.h"
#include "diloco/fragment/schedule.h"

namespace diloco {

struct FragmentExplained {
  FragmentId fragment = 0;
  std::vector<std::string> tensors;  // sorted by name
  std::uint64_t numel = 0;
  std::uint64_t up_bytes = 0;    // of a contribution
  std::uint64_t down_bytes = 0;  // of new weights
  Clock due = 0;                 // step of the first sync (lockstep: of the first adoption); then every sync_every steps
};

struct PlanExplained {
  std::vector<FragmentExplained> fragments;
  std::uint64_t numel = 0;
  std::uint64_t asked_fragments = 0;   // num_fragments, which may be more than there are
  std::uint64_t peak_up_bytes = 0;     // most bytes of contributions that become due in one step
  double ideal_peak_up_bytes = 0.0;    // the same if all fragments were of equal size
  std::vector<std::string> oversized;  // tensors larger than numel / fragments: they set the peak, whatever the plan
};

// Throws ConfigError if the layout or the settings are not usable.
PlanExplained explain(const Layout& layout, const Settings& settings);
// A table of fragments and what to know about it; several lines, the last one ends without a newline.
std::string to_text(const PlanExplained& plan, const Settings& settings);

}  // namespace diloco
