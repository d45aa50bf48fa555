// One boundary of the training thread: count, stage, adopt, report; and the token accounts that go with it.
#include <algorithm>

#include <fmt/format.h>

#include "diloco/core/learner_impl.h"

namespace diloco {
namespace {

std::uint64_t merged_of(const MergedTable& table, Incarnation incarnation) {
  for (const auto& [who, to] : table) {
    if (who == incarnation) return to;
  }
  return 0;
}

}  // namespace

void LearnerCore::Impl::on_boundary(const Boundary& boundary) {
  ++steps;
  ++clock;
  tokens += boundary.tokens;
  lr = boundary.lr;
  actions.push_back(Progress{tokens});
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    // Without weights yet it expects nothing: it would hold for who waits for it.
    LearnerFragment& fragment = fragments[p];
    if (!fragment.adopted.none() && serves(link_of(p), p) && stages_on_schedule(p)) fragment.expecting = clock;
    if (!island()) stage(p);
  }
}

bool LearnerCore::Impl::stages_on_schedule(FragmentId p) const {
  return settings.mode == Mode::kLockstep && lockstep_stages_at(p, clock, settings, plan->cycle());
}

bool LearnerCore::Impl::adopts_on_schedule(const LearnerFragment& fragment) const {
  return fragment.expecting && clock >= *fragment.expecting + settings.overlap_steps;
}

bool LearnerCore::Impl::wants_staging(FragmentId p) const {
  const LearnerFragment& fragment = fragments[p];
  const bool lockstep = settings.mode == Mode::kLockstep;
  const bool late = lockstep && fragment.pull && fragment.pull->clock <= clock && !fragment.staged;
  // An island looks more than once at a boundary of lockstep, and stages once.
  if (island() && lockstep && tokens <= fragment.from) return false;
  const bool scheduled = stages_on_schedule(p) && !(island() && fragment.staged_step == steps);
  const bool wanted = lockstep ? scheduled || late : fragment.armed || fragment.pull;
  // Work sent and then overwritten here must be settled first, or two accounts of the same fragment would be open.
  if (fragment.in_limbo()) return false;
  const std::uint64_t epoch = link_of(p).epoch;
  if (!wanted || fragment.adopted.epoch != epoch || epoch == 0) return false;
  // About to change under the copy; but a waiting pull is answered first, or overwriting would starve slow learners.
  const bool about_to_adopt = fragment.ready || fragment.pending;
  return !fragment.readopt && (lockstep || !about_to_adopt || fragment.pull);
}

// Refreshes the host copy of a fragment that will be asked for, or has been.
void LearnerCore::Impl::stage(FragmentId p) {
  LearnerFragment& fragment = fragments[p];
  if (tokens <= fragment.from || !wants_staging(p)) return;
  BufferPtr out = staging_buffer(fragment, p);
  if (!out) return;
  fragment.staging = Staged{out, fragment.from, tokens, steps - fragment.from_steps, clock, fragment.adopted};
  actions.push_back(Stage{p, out});
}

// Two buffers per armed fragment, more only while sent images keep them; buffers nobody else holds are used again.
BufferPtr LearnerCore::Impl::staging_buffer(LearnerFragment& fragment, FragmentId p) {
  const std::uint64_t bytes = payloads[p][static_cast<std::size_t>(PayloadKind::kContribution)].bytes;
  const BufferPtr current = fragment.staged ? fragment.staged->bytes : nullptr;
  for (const auto& buffer : fragment.pool) {
    // 1: the pool; a buffer in `staged` may be rewritten only if the other one is busy, so it is skipped here.
    if (buffer != current && buffer.use_count() == 1) return buffer;
  }
  if (options.staging_bytes > 0) {
    std::uint64_t held = 0;
    for (const auto& other : fragments) {
      for (const auto& buffer : other.pool) held += buffer->size();
    }
    if (held + bytes > options.staging_bytes) {
      // Over the bound: give back what is idle elsewhere, else this fragment is staged at a later boundary.
      for (auto& other : fragments) {
        if (&other == &fragment || other.armed || other.pull) continue;
        other.staged.reset();
        std::erase_if(other.pool, [&](const BufferPtr& buffer) {
          const bool idle = buffer.use_count() == 1;
          if (idle) held -= buffer->size();
          return idle;
        });
      }
      if (held + bytes > options.staging_bytes) return nullptr;
    }
  }
  return fragment.pool.emplace_back(Buffer::make(bytes));
}

void LearnerCore::Impl::on_stages_done() {
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    LearnerFragment& fragment = fragments[p];
    if (!fragment.staging) continue;
    fragment.staged = *std::exchange(fragment.staging, std::nullopt);
    answer(p);
  }
  if (settings.mode == Mode::kLockstep) {
    for (auto& link : links) report(link);  // the syncer opens the round at this clock while we hold
  }
  if (planned) adopt_planned();
  else on_recheck();
}

// Not with poison in the weights: the round waits for what is done from clean ones, at the next boundary.
bool LearnerCore::Impl::must_hold(FragmentId p) const {
  const LearnerFragment& fragment = fragments[p];
  const bool here = fragment.ready && !island();  // in an island it is here when all ranks have it
  return settings.mode == Mode::kLockstep && serves(link_of(p), p) && adopts_on_schedule(fragment) && !here &&
         !fragment.readopt && !rejected && !gave_up && !closing;
}

std::string LearnerCore::Impl::holding_for() const {
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    if (must_hold(p)) return fmt::format("fragment {} after version {}", p, to_string(fragments[p].adopted));
  }
  return {};
}

bool LearnerCore::Impl::wants_adoption(FragmentId p) const {
  const LearnerFragment& fragment = fragments[p];
  const auto& image = island() ? fragment.pending : fragment.ready;
  if (!image || fragment.anchor_sending) return false;
  // Those of a round that was late may be waited for.
  if (settings.mode != Mode::kLockstep || !fragment.expecting || image->clock < *fragment.expecting) return true;
  return adopts_on_schedule(fragment);  // in lockstep the adoption step is the scheduled one
}

void LearnerCore::Impl::on_recheck() {
  // Asked for work of a clock it has passed, and without any, it makes some first: others may hold until it has answered.
  // So nobody holds for ever: what the learner with the smallest clock holds for, all others have passed.
  const bool owes_a_step = std::any_of(fragments.begin(), fragments.end(), [this](const LearnerFragment& fragment) {
    return fragment.pull && fragment.pull->clock <= clock && tokens <= fragment.from;
  });
  holding = false;
  for (FragmentId p = 0; p < fragments.size() && !owes_a_step; ++p) holding = holding || must_hold(p);
  say_holding();
  if (island()) return;  // orders() tells all ranks
  if (!holding) return adopt_ready();
  // Rounds that are late (of who has just joined, after a restart of the syncer, for want of memory) go on meanwhile:
  // those waited for may not open before them.
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    LearnerFragment& fragment = fragments[p];
    if (fragment.pull && !fragment.staging) stage(p);
    if (!fragment.staging && !fragment.adopting && wants_adoption(p)) adopt(p);
  }
}

// What training stands still for, once it has lasted, and then every so often.
void LearnerCore::Impl::say_holding() {
  if (!stands_still.due(holding, now)) return;
  const auto away = std::find_if(links.begin(), links.end(), [](const ShardLink& link) { return !link.up(); });
  log(LogLevel::kWarning,
      fmt::format("in lockstep, waiting for {}: {}", holding_for(),
                  away != links.end()
                      ? fmt::format("the {} is away", name_of(*away))
                      : fmt::format("other learners have not done their part of it, or fewer than min_quorum = {} are here "
                                    "(`diloco status` says which)", settings.min_quorum)));
}

void LearnerCore::Impl::adopt_ready() {
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    if (fragments[p].adopting) continue;
    if (wants_adoption(p)) adopt(p);
    else if (fragments[p].readopt && !fragments[p].anchor_sending) readopt(p);
  }
}

void LearnerCore::Impl::discard(FragmentId p, std::uint64_t from, std::uint64_t to, DiscardReason reason) {
  if (from >= to) return;
  link_of(p).discarded[reason_name(reason)] += to - from;
  actions.push_back(Discard{p, from, to, reason});
}

// What became of work that was sent and then overwritten locally, once a version says how far was merged.
void LearnerCore::Impl::settle_limbo(FragmentId p, std::uint64_t merged_to) {
  LearnerFragment& fragment = fragments[p];
  if (!fragment.in_limbo() || merged_to <= fragment.limbo_from) return;
  const std::uint64_t merged = merged_to > fragment.from ? fragment.limbo_from : std::min(merged_to, fragment.limbo_to);
  tokens_merged += merged - fragment.limbo_from;
  discard(p, merged, fragment.limbo_to, DiscardReason::kOverwritten);
  fragment.limbo_from = fragment.limbo_to = 0;
}

// The limbo interval ends where the newest copy ends that can still be merged.
void LearnerCore::Impl::shrink_limbo(FragmentId p, DiscardReason reason) {
  LearnerFragment& fragment = fragments[p];
  if (!fragment.in_limbo()) return;
  const std::uint64_t end = std::min(fragment.newest_sent_from(fragment.limbo_from), fragment.limbo_to);
  discard(p, end, fragment.limbo_to, reason);
  fragment.limbo_to = end;
}

// The local work since `from` is given up, except what has been sent and may still be merged.
void LearnerCore::Impl::drop_local_work(FragmentId p, DiscardReason reason) {
  LearnerFragment& fragment = fragments[p];
  const std::uint64_t sent_to = fragment.newest_sent_from(fragment.from);
  if (sent_to > fragment.from) {
    discard(p, fragment.limbo_from, fragment.limbo_to, DiscardReason::kOverwritten);
    fragment.limbo_from = fragment.from;
    fragment.limbo_to = sent_to;
    actions.push_back(Discard{p, fragment.from, sent_to, DiscardReason::kInFlight});
  }
  discard(p, sent_to, tokens, reason);
  fragment.from = tokens;
  fragment.from_steps = steps;
  fragment.staged.reset();
  miss_if_in_limbo(p);
}

AdoptPlan LearnerCore::Impl::adoption_of(FragmentId p, const ReadyImage& image) const {
  const LearnerFragment& fragment = fragments[p];
  AdoptPlan how;
  how.formula = settings.adopt == Adopt::kRebase ? AdoptFormula::kRebase
                : settings.adopt == Adopt::kBlend ? AdoptFormula::kBlend
                                                  : AdoptFormula::kOverwrite;
  const std::uint64_t merged_to = merged_of(image.merged, options.incarnation);
  // What it had before it joined is not the run's: there is nothing to blend the first weights with.
  if (how.formula == AdoptFormula::kBlend && fragment.adopted.none()) how.formula = AdoptFormula::kOverwrite;
  std::uint64_t from_steps = fragment.from_steps;
  if (merged_to > fragment.from) {
    const auto merged = std::find_if(fragment.sent.begin(), fragment.sent.end(), [&](const SentImage& sent) {
      return sent.staged.from == fragment.from && sent.staged.to == merged_to;
    });
    if (merged != fragment.sent.end()) {
      how.merged = *merged;
      from_steps = merged->steps_at_to;
    } else {
      how.formula = AdoptFormula::kOverwrite;
      how.drop = DiscardReason::kOverwritten;
    }
  }
  // The weights held here, under a new name: a syncer that lost its state has them back. Nothing changes, so the work
  // done on them meanwhile stays, whatever the formula, and is not too old however much it is.
  const bool new_life = image.version.epoch > fragment.adopted.epoch;
  const bool renamed = new_life && image.version.n == fragment.adopted.n && settings.mode == Mode::kDecoupled;
  if (fragment.readopt) {
    how.formula = AdoptFormula::kOverwrite;
    how.drop = *fragment.readopt;
    how.reset = true;
  } else if (renamed) {
    how.formula = AdoptFormula::kRebase;
  } else if (how.formula == AdoptFormula::kOverwrite) {
    how.drop = DiscardReason::kOverwritten;
  } else if (how.formula == AdoptFormula::kBlend) {
    how.drop = DiscardReason::kBlended;
  } else if (!fragment.adopted.none() && steps - from_steps > settings.carry_limit_steps()) {
    how.formula = AdoptFormula::kOverwrite;
    how.drop = DiscardReason::kCarryLimit;
  }
  return how;
}

void LearnerCore::Impl::adopt(FragmentId p) {
  const ReadyImage image = *std::exchange(fragments[p].ready, std::nullopt);
  adopt(p, image, adoption_of(p, image));
}

void LearnerCore::Impl::adopt(FragmentId p, const ReadyImage& image, const AdoptPlan& how) {
  LearnerFragment& fragment = fragments[p];
  const std::uint64_t merged_to = merged_of(image.merged, options.incarnation);
  AdoptFragment action;
  action.fragment = p;
  action.version = image.version;
  action.image = image.bytes;
  action.formula = how.formula;
  action.blend_alpha = static_cast<float>(settings.blend_alpha);
  action.reset_inner_state = how.reset;
  if (how.merged && how.formula == AdoptFormula::kRebase) action.sent = how.merged->staged.bytes;

  if (merged_to < fragment.merged_to) {
    // A syncer that lost its state went on from older weights. Its event log says which merges that undid.
    log(LogLevel::kWarning, fmt::format("fragment {}: the syncer lost what it had merged of this learner after token {}",
                                        p, merged_to));
  }
  if (merged_to > fragment.from) {
    settle_limbo(p, merged_to);
    ++contributions_merged;
    tokens_merged += merged_to - fragment.from;
    fragment.from = merged_to;
    if (how.merged) {
      fragment.from_steps = how.merged->steps_at_to;
    } else {
      // Merged, but the image is gone (it cannot be told apart from the rest of the local work).
      log(LogLevel::kWarning, fmt::format("fragment {}: tokens up to {} were merged from a copy that is no longer here; "
                                          "the local work since then is dropped", p, merged_to));
      drop_local_work(p, DiscardReason::kOverwritten);
    }
  } else {
    if (fragment.in_limbo() && merged_to > fragment.limbo_from) ++contributions_merged;
    settle_limbo(p, merged_to);
  }
  std::erase_if(fragment.sent, [&](const SentImage& sent) {
    return (sent.gone && sent.staged.to <= merged_to) || sent.staged.base.epoch < image.version.epoch;
  });
  // What the old life held went down with it.
  if (image.version.epoch > fragment.adopted.epoch) shrink_limbo(p, DiscardReason::kOverwritten);
  if (how.drop) drop_local_work(p, *how.drop);
  if (how.reset) fragment.readopt.reset();
  fragment.staged.reset();
  fragment.merged_to = merged_to;
  fragment.merged_table = image.merged;
  fragment.adopted = image.version;
  fragment.adopting = true;
  fragment.expecting.reset();
  clock = std::max(clock, image.clock);
  link_of(p).unreported.push_back({p, fragment.adopted});
  ++adoptions;
  actions.push_back(std::move(action));
}

// The local values are poison: take the anchor again, with fresh inner state.
void LearnerCore::Impl::readopt(FragmentId p) {
  LearnerFragment& fragment = fragments[p];
  drop_local_work(p, *fragment.readopt);
  fragment.readopt.reset();
  fragment.adopting = true;
  AdoptFragment action;
  action.fragment = p;
  action.version = fragment.adopted;
  action.formula = AdoptFormula::kOverwrite;
  action.reset_inner_state = true;
  actions.push_back(std::move(action));
}

void LearnerCore::Impl::on_adopts_done() {
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    LearnerFragment& fragment = fragments[p];
    fragment.adopting = false;
    if (fragment.anchor_wanted) send_anchor(p);
  }
  // In lockstep everything has been told before holding, but what was adopted, and to every shard the clock that may have
  // raised.
  const bool news = settings.mode == Mode::kDecoupled ||
                    std::any_of(links.begin(), links.end(), [](const ShardLink& link) { return !link.unreported.empty(); });
  for (auto& link : links) {
    if (news) report(link);
    pump(link);
  }
}

void LearnerCore::Impl::report(ShardLink& link) {
  if (!link.up()) return;
  std::erase_if(link.unreported, [&](const Adopted& one) { return !serves(link, one.fragment); });  // of another session
  send(link, Channel::kControl, MessageType::kStep, encode(Step{clock, steps, tokens, link.unreported}));
  link.unreported.clear();
}

}  // namespace diloco
