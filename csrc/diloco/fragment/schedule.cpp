#include "diloco/fragment/schedule.h"

namespace diloco {
namespace {

// First member of {first, first + step, first + 2*step, ...} that is >= wanted.
Clock first_at_or_after(Clock wanted, Clock first, Clock step) {
  if (wanted <= first) return first;
  return first + (wanted - first + step - 1) / step * step;
}

bool is_adoption(FragmentId p, Clock t, const Settings& settings, std::uint32_t num_fragments) {
  const Clock first = lockstep_adoption(p, 0, settings, num_fragments);
  return t >= first && (t - first) % settings.sync_every == 0;
}

}  // namespace

Clock phase(FragmentId p, std::uint32_t sync_every, std::uint32_t num_fragments) {
  return (Clock{p} * sync_every + sync_every + num_fragments - 1) / num_fragments;
}

Clock first_due(FragmentId p, std::uint32_t sync_every, std::uint32_t num_fragments) {
  return phase(p, sync_every, num_fragments);
}

Clock next_due(FragmentId p, Clock opened_at, std::uint32_t sync_every, std::uint32_t num_fragments) {
  const Clock half = (Clock{sync_every} + 1) / 2;
  return first_at_or_after(opened_at + half, phase(p, sync_every, num_fragments), sync_every);
}

Clock lockstep_adoption(FragmentId p, std::uint64_t k, const Settings& settings, std::uint32_t num_fragments) {
  const Clock every = settings.sync_every;
  const Clock first = settings.offsets == Offsets::kStreaming ? every + Clock{p} * every / num_fragments
                                                              : phase(p, settings.sync_every, num_fragments);
  return first + k * every;
}

bool lockstep_adopts_at(FragmentId p, Clock t, const Settings& settings, std::uint32_t num_fragments) {
  return t > settings.overlap_steps && is_adoption(p, t, settings, num_fragments);
}

bool lockstep_stages_at(FragmentId p, Clock t, const Settings& settings, std::uint32_t num_fragments) {
  return t >= 1 && is_adoption(p, t + settings.overlap_steps, settings, num_fragments);
}

Clock lockstep_next_staging(FragmentId p, Clock t, const Settings& settings, std::uint32_t num_fragments) {
  const Clock first = lockstep_adoption(p, 0, settings, num_fragments);
  const Clock from = t > 0 ? t : 1;
  return first_at_or_after(from + settings.overlap_steps, first, settings.sync_every) - settings.overlap_steps;
}

}  // namespace diloco
