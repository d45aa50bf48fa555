// When a fragment is due, in clock ticks (inner steps). Pure arithmetic; design: docs/concepts.md "Schedule".
#pragma once

#include <cstdint>

#include "diloco/base/settings.h"

namespace diloco {

using Clock = std::uint64_t;

// Phase of fragment p: the clock, in [1, H], at which its first sync falls: ceil((p + 1) * H / P).
Clock phase(FragmentId p, std::uint32_t sync_every, std::uint32_t num_fragments);

// Decoupled mode. First due clock of p, and the due clock after a round that opened at clock t: the first
// phase-aligned value >= t + H/2. Gaps are at least H/2, on average at least H; no burst after an outage.
Clock first_due(FragmentId p, std::uint32_t sync_every, std::uint32_t num_fragments);
Clock next_due(FragmentId p, Clock opened_at, std::uint32_t sync_every, std::uint32_t num_fragments);

// Lockstep. The k-th adoption clock of p (staggered: phase + kH; streaming: H + p*H/P + kH, rounded down), and whether
// clock t is an adoption clock / a staging clock (adoption - tau; those <= 0 are skipped) of p. Where the staging is
// skipped nothing comes back, so that clock is no adoption clock either (t <= tau).
Clock lockstep_adoption(FragmentId p, std::uint64_t k, const Settings& settings, std::uint32_t num_fragments);
bool lockstep_adopts_at(FragmentId p, Clock t, const Settings& settings, std::uint32_t num_fragments);
bool lockstep_stages_at(FragmentId p, Clock t, const Settings& settings, std::uint32_t num_fragments);
// First staging clock >= t (and >= 1).
Clock lockstep_next_staging(FragmentId p, Clock t, const Settings& settings, std::uint32_t num_fragments);

}  // namespace diloco
