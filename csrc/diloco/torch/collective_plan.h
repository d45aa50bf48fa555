// A run without a syncer, as all its ranks must see it: settings, fragments and what travels for each. Pure values.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "diloco/base/settings.h"
#include "diloco/fragment/layout.h"
#include "diloco/fragment/plan.h"

namespace diloco {

// The settings of a run without a syncer from those that were given: mode is lockstep. Throws ConfigError for what the
// settings themselves refuse, for another mode, and for settings that mean something to a syncer only, by name.
Settings collective_settings(const std::map<std::string, std::string>& given);

// Work of a rank on one fragment since it last settled, and what it weighs in a merge. As bytes it ends a message.
struct Work {
  std::uint64_t tokens = 0, steps = 0;
  double weight = 0.0;
  double lr = 0.0;  // of the inner optimizer; 0 = not known
};
// 0 without tokens: a syncer does not ask for such work either.
Work work_of(const Settings& settings, std::uint64_t tokens, std::uint64_t steps, double lr);

// What one rank sends for one fragment: the payload of a contribution as a syncer would get it, then its Work.
struct FragmentMessage {
  PayloadLayout contribution, anchor, image;
  std::vector<bool> use_rda;  // per segment
  std::uint64_t work = 0;     // byte offset of the Work, a multiple of 64
  std::uint64_t bytes = 0;    // a multiple of 64
};

struct CollectivePlan {
  Layout layout;
  Settings settings;
  Plan plan;
  std::vector<FragmentMessage> messages;  // by fragment
  int rank = 0, ranks = 1;

  std::uint32_t size() const { return plan.size(); }
};

// Throws ConfigError if the layout is not usable.
CollectivePlan make_collective_plan(Layout layout, Settings settings, int rank, int ranks);

// "" if both are of one run: same settings, same layout. Else the first difference in one clause that names both ranks:
// "rank 1 has sync_every = 8, rank 0 has 4".
std::string first_difference(const Layout& layout, const std::map<std::string, std::string>& settings, int rank,
                             const Layout& layout_of_0, const std::map<std::string, std::string>& settings_of_0);

}  // namespace diloco
