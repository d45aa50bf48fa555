// What a run takes of host memory, before it is started: docs/concepts.md, Memory. Bytes, from layout and settings alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "diloco/base/settings.h"
#include "diloco/fragment/layout.h"
#include "diloco/fragment/plan.h"

namespace diloco {

struct LearnerBudget {
  std::uint64_t anchors = 0;
  std::uint64_t copies = 0;       // staged and sent, as they are most of the time: three of each fragment
  std::uint64_t copies_most = 0;  // at most: two staged, two the syncer may hold, one being sent, one waiting for it
  std::uint64_t arriving = 0;     // every fragment has arrived and waits for the boundary, and the largest comes again
  std::uint64_t wire = 0;         // chunks received and not yet put together: the credit window
  std::uint64_t scratch = 0;      // decoding of the largest tensor
  std::uint64_t usual() const { return anchors + copies + arriving + wire + scratch; }
  std::uint64_t most() const { return anchors + copies_most + arriving + wire + scratch; }
};
// `staging_bytes`: the learner's own bound on the copies, 0 = none.
LearnerBudget learner_budget(const Layout& layout, const Plan& plan, const Settings& settings,
                             std::uint64_t staging_bytes);

struct SyncerBudget {
  std::uint64_t weights = 0;       // theta, outer state, outgoing images
  std::uint64_t merging = 0;       // the next state of the largest fragment beside the present one; its buffers are kept
  std::uint64_t least = 0;         // contributions: of one round of the largest fragment; with less, learners are refused
  std::uint64_t comfortable = 0;   // contributions: nobody waits for a turn
  std::uint64_t retained = 0;      // anchor = syncer: images of earlier versions, at most
};
SyncerBudget syncer_budget(const Layout& layout, const Plan& plan, const Settings& settings, std::size_t learners);

}  // namespace diloco
