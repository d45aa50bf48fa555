// due_merged, no_starvation: as long as K learners (in lockstep: all) run with working links, every fragment of every shard
// that runs is merged in bounded time; and whoever does is merged into every one of them in bounded time.
#include <algorithm>

#include <fmt/format.h>

#include "diloco/sim/invariants_impl.h"

namespace diloco::sim {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace

void Invariants::set_well(std::size_t learner, bool well) { run_->set_well(run_->well_since[learner], well); }
void ShardInvariants::set_well(bool well) { impl_->run.set_well(impl_->run.shard_well_since[impl_->shard], well); }
Seconds Invariants::patience() const { return run_->patience(); }

void RunBooks::set_well(TimePoint& since, bool well) {
  if (well != (since == kNever)) return;
  since = well ? now : kNever;
  std::vector<TimePoint> sorted = well_since;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t needed =
      settings.mode == Mode::kLockstep ? std::max<std::size_t>(sorted.size(), settings.min_quorum) : settings.min_quorum;
  quorum_well_since = sorted.size() < needed ? kNever : sorted[needed - 1];
}

// From the settings and the network: periods of the slowest learner, the whole model over the narrowest link, and the time
// in which connections, sessions and weights are made again.
Seconds RunBooks::patience() const {
  Seconds step = 0.0, network = 0.0;
  const double parameters = static_cast<double>(options.layout.numel());
  for (const auto& learner : options.learners) {
    const Link link = options.link_of(learner);
    step = std::max(step, learner.step_s * (1.0 + learner.jitter));
    const double chunks = 4.0 * parameters / static_cast<double>(settings.chunk_bytes) + 4.0 * static_cast<double>(fragments.size());
    const double bytes = 4.0 * parameters + 512.0 * chunks;
    Seconds once = 8.0 * (link.delay_s + link.jitter_s);
    for (const double rate : {link.up_bytes_per_s, link.down_bytes_per_s}) once += rate > 0.0 ? bytes / rate : 0.0;
    // Every window of credit costs a round trip.
    once += 2.0 * (link.delay_s + link.jitter_s) * (1.0 + 4.0 * parameters / static_cast<double>(settings.credit_window_bytes));
    network = std::max(network, once);
  }
  const Seconds round = network + options.merge_s + options.persist_s + settings.grace_s + settings.grace_cap_s + step;
  const double inflight = settings.max_inflight > 0 ? settings.max_inflight : 1.0;
  return 4.0 * settings.sync_every * step + 8.0 * step + (4.0 + 2.0 * static_cast<double>(fragments.size()) / inflight) * round +
         2.0 * settings.heartbeat_timeout_s + 10.0;
}

// One fragment and one learner an event, by turns.
void RunBooks::check_progress() {
  // Huge weights that are finite are a model that has diverged: nothing can be merged into it any more.
  if (fragments.empty() || huge_values) return;
  if (patience_s < 0.0) patience_s = patience();
  const std::size_t pairs = fragments.size() * well_since.size();
  const std::size_t pair = event % pairs;
  const FragmentId p = static_cast<FragmentId>(pair % fragments.size());
  const std::size_t learner = pair / fragments.size();
  // In lockstep training stands still while any shard is away.
  const TimePoint shard_well = settings.mode == Mode::kLockstep
                                   ? *std::max_element(shard_well_since.begin(), shard_well_since.end())
                                   : shard_well_since[fragments[p].shard];
  const TimePoint all_well = std::max(quorum_well_since, shard_well);
  const TimePoint merged = std::max(fragments[p].merged_at, all_well);
  if (now > merged + patience_s) {
    fail("due_merged", fmt::format("fragment {} has not been merged for {:.1f} s with {} learners there", p, now - merged,
                                   settings.min_quorum));
    fragments[p].merged_at = now;
  }
  // With a bound on staleness a slow learner may be refused for ever, as asked for.
  if (settings.staleness_limit() > 0) return;
  LifeBooks* life = current[learner];
  const TimePoint well = std::max(well_since[learner], all_well);
  if (!life || well == kNever) return;
  Share& share = this->share(*life, p);
  const TimePoint contributed = std::max(share.contributed_at, well);
  if (now > contributed + patience_s) {
    fail("no_starvation", fmt::format("{} has not contributed to fragment {} for {:.1f} s with a working link", life->id, p,
                                      now - contributed));
    share.contributed_at = now;
  }
}

}  // namespace diloco::sim
