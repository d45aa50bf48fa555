// The life of a round: due, open, quorum and grace, close, merge.
#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/core/syncer_impl.h"
#include "diloco/core/syncer_record.h"

namespace diloco {

Clock SyncerCore::Impl::first_due_clock(FragmentId p) const {
  return settings.mode == Mode::kLockstep ? lockstep_next_staging(p, 1, settings, plan.cycle())
                                          : first_due(p, settings.sync_every, plan.cycle());
}

Clock SyncerCore::Impl::next_due_clock(FragmentId p, Clock opened_at) const {
  return settings.mode == Mode::kLockstep ? lockstep_next_staging(p, opened_at + 1, settings, plan.cycle())
                                          : next_due(p, opened_at, settings.sync_every, plan.cycle());
}

std::vector<LearnerPace> SyncerCore::Impl::pace() const {
  std::vector<LearnerPace> pace;
  for (const auto& [id, session] : sessions) {
    // A learner that has not made a step here yet (waiting for the weights, or compiling) sets no pace.
    if (session.control == 0 || session.steps == 0) continue;
    if (settings.mode == Mode::kDecoupled && stalled(session)) continue;
    pace.push_back({session.clock, session.step_s.value_or(0.0)});
  }
  return pace;
}

std::optional<Clock> SyncerCore::Impl::clock_now() const { return quorum_clock(pace(), settings.min_quorum); }
Seconds SyncerCore::Impl::xi_step() const { return quorum_step_s(pace(), settings.min_quorum); }

Round& SyncerCore::Impl::add_round(FragmentId p, Clock clock, TimePoint opened) {
  Round& round = rounds[next_round];
  round.id = next_round++;
  round.fragment = p;
  round.clock = clock;
  round.opened = opened;
  slots[p].open_round = round.id;
  return round;
}

void SyncerCore::Impl::record_opening(const Round& round, const std::set<std::string>& pulled) {
  record(nlohmann::json{{"event", "open"}, {"round", round.id}, {"fragment", round.fragment}, {"clock", round.clock},
                        {"quorum", round.quorum}, {"pulled", pulled}});
}

// Without those that wait for learners which have added what others have.
std::size_t SyncerCore::Impl::under_way() const {
  return static_cast<std::size_t>(std::count_if(rounds.begin(), rounds.end(), [this](const auto& entry) {
    const Round& round = entry.second;
    return round.phase != RoundPhase::kCollecting || enough_have(round.fragment);
  }));
}

void SyncerCore::Impl::open_rounds(std::optional<Clock> clock, Seconds step) {
  if (shutdown_at || !layout) return;
  const std::uint32_t limit = inflight_limit(settings, owned_fragments(), round_s.value_or(0.0), step);
  while (true) {
    FragmentSlot* earliest = nullptr;
    FragmentId p = 0;
    for (FragmentId i = 0; i < slots.size(); ++i) {
      FragmentSlot& slot = slots[i];
      if (!slot.state || slot.open_round != 0) continue;
      const bool due = clock && slot.due <= *clock && enough_have(i);
      if (!due) {
        slot.due_since = 0.0;
        continue;
      }
      if (slot.due_since == 0.0) slot.due_since = now;
      if (!earliest || slot.due < earliest->due) earliest = &slot, p = i;
    }
    if (!earliest || under_way() >= limit) return;
    if (!round_fits(p)) return;
    Round& round = add_round(p, settings.mode == Mode::kLockstep ? earliest->due : *clock, now);
    round.quorum = quorum_of(p);
    if (earliest->opened_at > 0) {
      due_gap.add(static_cast<double>(round.clock - earliest->opened_at));
      say_pace();
    }
    earliest->opened_at = round.clock;
    earliest->due_since = 0.0;
    earliest->due = next_due_clock(p, round.clock);
    pull_contributors();
    record_opening(round, round.pulled);
  }
}

// trigger = arrival: each contribution is a round of its own, first come, first merged.
void SyncerCore::Impl::open_on_arrival() {
  for (FragmentId p = 0; p < slots.size(); ++p) {
    if (!slots[p].state || slots[p].open_round != 0) continue;
    const Contribution* first = nullptr;
    for (const auto& [incarnation, account] : accounts) {
      const auto& held = account.mailbox[p];
      if (held && (!first || held->arrived < first->arrived)) first = &*held;
    }
    if (!first) continue;
    Round& round = add_round(p, first->begin.clock, first->arrived);
    round.quorum_at = now;
    round.only = first->incarnation;
    record_opening(round, {first->learner});
    close_round(round, "arrival");
  }
}

// With steps as short as this no link keeps up with a round every few of them; nobody needs to be warned of toys.
LogLevel SyncerCore::Impl::pace_level() const {
  constexpr Seconds kToyStep = 0.02;
  return xi_step() < kToyStep ? LogLevel::kInfo : LogLevel::kWarning;
}

// Once when the network cannot keep up, and again if it recovers and then cannot.
void SyncerCore::Impl::say_pace() {
  const double effective = due_gap.value_or(settings.sync_every);
  if (effective < 1.25 * settings.sync_every) slow_warned = false;
  if (effective <= 1.5 * settings.sync_every || slow_warned) return;
  slow_warned = true;
  log(pace_level(),
      fmt::format("each fragment is synced every {:.0f} steps instead of sync_every = {}: a round takes {:.2g} s, a step "
                  "{:.2g} s; a faster link, a larger sync_every or a smaller wire_dtype would help",
                  effective, settings.sync_every, round_s.value_or(0.0), xi_step()));
}

// A learner whose answers come too late for round after round: its work is merged later and later. Said for the first of
// its fragments only.
void SyncerCore::Impl::count_missed(const Round& round) {
  constexpr unsigned kSayAt = 3;
  for (auto& [id, session] : sessions) {
    if (session.control == 0 || !round.pulled.contains(session.account->learner)) continue;
    unsigned& missed = session.missed[round.fragment];
    missed = round.waiting.contains(id) ? missed + 1 : 0;
    const auto late = std::count_if(session.missed.begin(), session.missed.end(), [](unsigned n) { return n >= kSayAt; });
    if (missed != kSayAt || late > 1) continue;
    log(pace_level(), fmt::format("learner '{}' was too late for {} rounds of fragment {} in a row; what it sends is "
                                        "merged in later ones (a longer grace window, or a faster link, would help)",
                                        session.account->learner, missed, round.fragment));
  }
}

RoundView SyncerCore::Impl::view_of(const Round& round) const {
  RoundView view;
  view.quorum = round.quorum;
  for (const auto& [incarnation, account] : accounts) {
    const auto& held = account.mailbox[round.fragment];
    view.complete += held.has_value();
    // In lockstep everybody is waited for in any case.
    view.fresh += held && (settings.mode == Mode::kLockstep || held->arrived > round.opened);
  }
  view.deadline = round.deadline;
  view.capped = round.capped;
  for (const auto& [id, session] : sessions) {
    if (session.control == 0) continue;
    const bool lockstep = settings.mode == Mode::kLockstep;
    if (round.waiting.contains(id) && (lockstep || !stalled(session))) ++view.waited_for;
    // In lockstep a learner that has not reached the clock yet is waited for too.
    const bool there = round.pulled.contains(session.account->learner) || session.account->mailbox[round.fragment];
    if (lockstep && !there && session.steps > 0 && session.has(round.fragment)) ++view.waited_for;
  }
  return view;
}

void SyncerCore::Impl::check_rounds() {
  std::vector<std::uint64_t> numbers;
  for (const auto& [number, round] : rounds) numbers.push_back(number);
  for (const auto number : numbers) {
    const auto it = rounds.find(number);
    if (it == rounds.end() || it->second.phase != RoundPhase::kCollecting) continue;
    Round& round = it->second;
    RoundView view = view_of(round);
    if (!round.quorum_at && has_quorum(view)) {
      round.quorum_at = now;
      xi_quorum.add(now - round.opened);
      const GraceWindow window =
          grace_window(settings, xi_step(), xi_quorum.value_or(0.0), xi_sync.value_or(0.0));
      view.deadline = round.deadline = now + window.seconds;
      view.capped = round.capped = window.capped;
    }
    const Decision decision = decide(view, settings, now);
    if (decision.action == RoundAction::kClose) close_round(round, decision.reason);
  }
}

void SyncerCore::Impl::close_round(Round& round, const std::string& reason) {
  const FragmentId p = round.fragment;
  FragmentSlot& slot = slots[p];
  round.phase = RoundPhase::kMerging;
  round.closed_at = now;
  round.reason = reason;
  count_missed(round);
  for (auto& [incarnation, account] : accounts) {
    if (!account.mailbox[p] || (round.only != 0 && incarnation != round.only)) continue;
    round.members.push_back(std::move(*account.mailbox[p]));
    account.mailbox[p].reset();
  }
  std::sort(round.members.begin(), round.members.end(), [](const Contribution& a, const Contribution& b) {
    return std::tie(a.learner, a.incarnation) < std::tie(b.learner, b.incarnation);
  });

  MergeJob job;
  job.in = slot.contribution;
  job.out = slot.image_layout;
  job.use_rda = slot.use_rda;
  job.outer = outer_options(settings);
  job.previous = slot.state;
  job.next_version = {epoch, slot.state->version.n + 1};
  job.chunk_bytes = settings.chunk_bytes;
  double sum = 0.0;
  round.weights.clear();
  for (const auto& member : round.members) {
    const std::uint64_t behind =
        member.begin.base.epoch == slot.state->version.epoch ? slot.state->version.n - member.begin.base.n : 0;
    const double weight = contribution_weight(settings.weights, member.begin.to - member.begin.from,
                                              member.begin.c_steps, settings.staleness_discount, behind);
    const auto base = slot.retained.find(member.begin.base);
    job.members.push_back({member.learner, member.payload, weight, member.norms,
                           base == slot.retained.end() ? nullptr : base->second});
    round.weights.push_back(weight);
    sum += weight;
    accounts.at(member.incarnation).merged_in[p] = job.next_version;  // not pulled again before it has adopted this
  }
  for (auto& weight : round.weights) weight = sum > 0.0 ? weight / sum : 0.0;
  for (std::size_t i = 1; i < round.members.size() && !same_data_warned; ++i) {
    double norm = 0.0;
    for (const double value : round.members[i].norms) norm += value;
    if (norm > 0.0 && round.members[i].norms == round.members[i - 1].norms) {
      same_data_warned = true;
      log(LogLevel::kWarning, fmt::format("learners '{}' and '{}' sent equal contributions: do they train on the same "
                                          "data in the same order?", round.members[i - 1].learner,
                                          round.members[i].learner));
    }
  }
  const JobId id = next_job++;
  jobs[id] = {p, round.id, {}};
  actions.push_back(RunMerge{id, std::move(job)});
}

// A round whose merge came to nothing. With trigger = arrival its one member was all there was.
void SyncerCore::Impl::collect_again(Round& round) {
  for (const auto& member : round.members) accounts.at(member.incarnation).merged_in[round.fragment] = {};
  round.members.clear();
  round.weights.clear();
  round.phase = RoundPhase::kCollecting;
  round.quorum_at.reset();
  round.deadline.reset();
  round.pulled.clear();
  if (round.only == 0) return;
  slots[round.fragment].open_round = 0;
  rounds.erase(round.id);
}

void SyncerCore::Impl::on_merge_done(const MergeDone& done) {
  const auto it = jobs.find(done.job);
  if (it == jobs.end()) return;
  const JobInfo info = it->second;
  jobs.erase(it);
  Round& round = rounds.at(info.round);
  const FragmentId p = round.fragment;
  if (round.members.front().begin.base.epoch != epoch) {
    // The epoch has changed meanwhile: work on versions of an earlier one is not merged, as its learners have been told.
    const std::vector<Contribution> members = round.members;
    collect_again(round);
    for (const auto& member : members) {
      refuse(member.learner, member.incarnation, member.begin, DiscardReason::kStale, false, "the epoch has changed");
    }
    return;
  }
  if (!done.result.ok) {
    // The next state would not be finite: nothing was replaced. Drop the largest and collect again.
    const Contribution worst = round.members.at(done.result.largest_member);
    for (auto& member : round.members) {
      Account& account = accounts.at(member.incarnation);
      auto& held = account.mailbox[p];
      if (member.incarnation != worst.incarnation && !held && !account.tombstoned) held = std::move(member);
    }
    collect_again(round);
    refuse(worst.learner, worst.incarnation, worst.begin, DiscardReason::kNonfinite, true,
           "merging it would make the global weights infinite");
    return;
  }
  round.result = done.result;
  round.phase = RoundPhase::kPersisting;
  nlohmann::json members = nlohmann::json::array();
  for (std::size_t i = 0; i < round.members.size(); ++i) {
    const Contribution& member = round.members[i];
    Account& account = accounts.at(member.incarnation);
    account.merged_to[p] = member.begin.to;
    account.merged_in[p] = round.result.next->version;
    account.merged_tokens += member.begin.to - member.begin.from;
    const auto& held = account.mailbox[p];
    if (held && held->begin.from < account.merged_to[p]) refuse_held(account, p, "part of it has just been merged");
    members.push_back({{"learner", member.learner}, {"incarnation", hex(member.incarnation)},
                       {"from", member.begin.from}, {"to", member.begin.to}, {"steps", member.begin.c_steps},
                       {"clock", member.begin.clock}, {"weight", round.weights[i]}});
  }
  record(nlohmann::json{{"event", "merge"}, {"round", round.id}, {"fragment", p}, {"clock", round.clock},
                        {"version", to_json(round.result.next->version)}, {"members", members},
                        {"reason", round.reason}, {"quorum_s", *round.quorum_at - round.opened},
                        {"wait_s", round.closed_at - *round.quorum_at}, {"grace_s", round.deadline.value_or(*round.quorum_at) - *round.quorum_at},
                        {"merge_s", now - round.closed_at},
                        {"delta_norm", round.result.delta_norm}});
  actions.push_back(Persist{p, round.result.next});
}

}  // namespace diloco
