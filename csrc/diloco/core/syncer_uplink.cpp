// From PULL to mailbox: whom to ask, what arrives, and whether it may count.
#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/core/syncer_impl.h"
#include "diloco/core/syncer_record.h"

namespace diloco {

// Everybody with work contributes, however far behind its clock is: asking for clock >= t starves every learner slower
// than the K-th fastest for ever.
bool SyncerCore::Impl::eligible(const Session& session, FragmentId p, Clock clock) const {
  if (session.control == 0 || !session.whole || !session.has(p) || session.pulled[p]) return false;
  const Account& account = *session.account;
  const Version adopted = session.adopted[p];
  if (adopted.epoch != epoch || adopted < account.merged_in[p] || too_stale(adopted, p)) return false;
  // In lockstep who is ahead of a round (late weights, a restart) and has no work left makes a step for it: it may hold for
  // another round, which waits for one who holds for this one.
  const bool ahead = settings.mode == Mode::kLockstep && session.steps > 0 && session.clock >= clock;
  if (account.tokens <= account.merged_to[p] && !ahead) return false;
  // Its last answer is being screened: a learner keeps two sent copies, one that may lie here and one that may replace it.
  for (const auto& [job, info] : jobs) {
    if (info.fragment == p && info.contribution.incarnation == account.incarnation) return false;
  }
  // Work that overwriting threw away after it was sent is not part of a newer copy: merge what lies here first.
  // In lockstep nobody makes more than what is held while the round is open.
  const auto& held = account.mailbox[p];
  if (held && settings.mode == Mode::kLockstep) return false;
  if (held && (held->given_up || (settings.adopt != Adopt::kRebase && held->begin.base != adopted))) return false;
  return true;
}

bool SyncerCore::Impl::too_stale(const Version& base, FragmentId p) const {
  const FragmentSlot& slot = slots[p];
  if (!slot.state) return true;  // the weights it started from have just given way to newer ones
  if (base == slot.state->version) return false;
  if (settings.anchor == Anchor::kSyncer && !slot.retained.contains(base)) return true;
  const std::uint64_t limit = settings.staleness_limit();
  return limit > 0 && slot.state->version.n > base.n + limit;
}

void SyncerCore::Impl::pull_contributors() {
  for (auto& [number, round] : rounds) {  // oldest round first: memory goes to it first
    if (round.phase != RoundPhase::kCollecting) continue;
    std::vector<Session*> asked;
    for (auto& [id, session] : sessions) {
      if (session.control == 0) continue;
      if (round.pulled.contains(session.account->learner) && !session.pulled[round.fragment]) continue;
      if (session.pulled[round.fragment]) {
        // Asked in an earlier round and not answered yet: the answer counts for this one.
        if (round.pulled.insert(session.account->learner).second) round.waiting.insert(id);
        continue;
      }
      if (eligible(session, round.fragment, round.clock)) asked.push_back(&session);
    }
    // If there may not be memory for all: first who has nothing here and makes steps, of them whose last merge is longest
    // ago.
    if (asked.size() > 1 && payload_memory_scarce()) {
      const auto turn = [this, p = round.fragment](const Session* session) {
        return std::tuple(session->account->mailbox[p].has_value(), stalled(*session), session->account->merged_in[p]);
      };
      std::stable_sort(asked.begin(), asked.end(), [&](const Session* a, const Session* b) { return turn(a) < turn(b); });
    }
    for (Session* session : asked) {
      if (!pull(*session, round.fragment, round.id, round.clock)) break;
      round.pulled.insert(session->account->learner);
      round.waiting.insert(session->id);
    }
  }
}

// trigger = arrival: everybody by its own clock, whatever the others do.
void SyncerCore::Impl::pull_due() {
  if (shutdown_at) return;
  struct Due {
    Seconds since = 0.0;
    Session* session = nullptr;
    FragmentId fragment = 0;
  };
  std::vector<Due> all;
  for (auto& [id, session] : sessions) {
    if (session.control == 0) continue;
    const Account& account = *session.account;
    for (FragmentId p = 0; p < slots.size(); ++p) {
      if (!slots[p].state || session.clock < account.due[p] || account.mailbox[p]) continue;
      if (!eligible(session, p, session.clock)) continue;
      const auto steps = static_cast<double>(session.clock - account.due[p]);
      all.push_back({steps * session.step_s.value_or(0.0), &session, p});
    }
  }
  // There may not be memory for all: what is due longest comes first, and a small one does not overtake a large one.
  std::stable_sort(all.begin(), all.end(), [](const Due& a, const Due& b) { return a.since > b.since; });
  for (const Due& due : all) {
    Session& session = *due.session;
    if (!pull(session, due.fragment, 0, session.clock)) return;
    session.account->due[due.fragment] = session.clock + steps_between_syncs(session);
  }
}

// Steps of a learner between two of its syncs of a fragment: sync_every, or with DyLU (Async Local-SGD, Eq. 6)
// floor(v / max v * sync_every), so that slow learners bring their work as often as fast ones.
Clock SyncerCore::Impl::steps_between_syncs(const Session& session) const {
  const Seconds own = session.step_s.value_or(0.0);
  if (settings.step_counts == StepCounts::kFixed || own <= 0.0) return settings.sync_every;
  Seconds fastest = own;
  for (const auto& [id, other] : sessions) {
    if (other.control != 0 && other.step_s.has_value()) fastest = std::min(fastest, other.step_s.value_or(own));
  }
  return std::max<Clock>(1, static_cast<Clock>(fastest / own * settings.sync_every));
}

bool SyncerCore::Impl::pull(Session& session, FragmentId p, std::uint64_t round, Clock clock) {
  if (!payload_fits(session, p)) return false;  // asked again when memory is free
  session.reserved += slots[p].contribution.bytes;
  session.pulled[p] = round;
  session.pulled_from[p] = session.adopted[p];
  const auto& held = session.account->mailbox[p];
  Pull pull;
  pull.fragment = p;
  pull.round = round;
  pull.clock = clock;
  pull.merged_to = session.account->merged_to[p];
  pull.held_to = held ? held->begin.to : 0;
  send(session.control, MessageType::kPull, &session, encode(pull), p, session.uplink_credit().grant_now());
  return true;
}

void SyncerCore::Impl::on_begin(Session& session, BulkLane& lane, const Header& header, const Begin& begin) {
  const FragmentId p = begin.fragment;
  if (!session.has(p)) {
    return violation(session, fmt::format("BEGIN for fragment {}; the plan has {}", p, session.fragments()));
  }
  if (!owns(p)) {
    return violation(session, fmt::format("BEGIN for fragment {} of syncer shard {}; this is shard {}", p,
                                          plan.fragments[p].shard, options.shard));
  }
  if (begin.kind != PayloadKind::kContribution && begin.kind != PayloadKind::kAnchor) {
    return violation(session, "a learner may not send images");
  }
  if (!lane.part.empty() && &lane != &session.lanes.front()) return gather(session, lane, header, begin, true);
  bool keep = true;
  if (begin.kind == PayloadKind::kAnchor) {
    keep = slots[p].init_from == session.id;
  } else {
    if (!session.pulled[p]) return violation(session, fmt::format("contribution to fragment {} without a PULL", p));
    if (begin.from >= begin.to || begin.c_steps == 0) {
      return violation(session, fmt::format("contribution of {} steps over tokens [{}, {})", begin.c_steps, begin.from,
                                            begin.to));
    }
    if (slots[p].state && begin.base > slots[p].state->version) {
      return violation(session, fmt::format("base version {} of fragment {} is in the future; the newest is {}",
                                            to_string(begin.base), p, to_string(slots[p].state->version)));
    }
  }
  if (!lane.part.empty()) return gather(session, lane, header, begin, keep);
  const PayloadLayout& expected = begin.kind == PayloadKind::kAnchor ? slots[p].anchor : slots[p].contribution;
  on_transfer(session, lane, lane.uplink.begin(header, begin, expected.bytes, keep));
}

// In place of the BEGIN asked for. What is held of this learner is merged first; if it is held no more, the learner has
// been told meanwhile and can be asked again.
void SyncerCore::Impl::on_miss(Session& session, const BulkLane& lane, FragmentId p) {
  if (&lane != &session.lanes.front()) {  // a rank no longer has the copy that the others send
    for (const auto kind : {PayloadKind::kContribution, PayloadKind::kAnchor}) {
      give_up_gathering(session, p, kind, fmt::format("part {} no longer has its copy", &lane - session.lanes.data()));
    }
    return;
  }
  const Begin* arriving = lane.uplink.current();
  const bool answered = session.gathering.contains({p, PayloadKind::kContribution}) ||
                        (arriving && arriving->fragment == p && arriving->kind == PayloadKind::kContribution);
  if (!session.has(p) || !session.pulled[p] || answered) {
    return violation(session, fmt::format("MISS of fragment {} without a PULL to answer", p));
  }
  session.pulled[p].reset();
  session.reserved -= slots[p].contribution.bytes;
  auto& held = session.account->mailbox[p];
  if (held) held->given_up = true;
  for (auto& [number, round] : rounds) {
    if (round.fragment != p) continue;
    round.waiting.erase(session.id);
    if (!held) round.pulled.erase(session.account->learner);
  }
}

void SyncerCore::Impl::on_chunk(Session& session, BulkLane& lane, const Header& header, Bytes payload) {
  lane.uplink_credit.receive(payload.size());
  on_transfer(session, lane, lane.uplink.chunk(header, payload));
  if (session.control == 0) return;
  // With a window below two chunks, half a window may still be too little for the next chunk: both would wait.
  ReceiverCredit& credit = lane.uplink_credit;
  const bool dry = credit.left() < settings.chunk_bytes;
  const bool first = &lane == &session.lanes.front();
  if (const auto total = dry ? credit.grant_now() : credit.announce()) {
    send(first ? session.control : lane.peer, MessageType::kCredit, &session, {}, 0, *total);
  }
}

void SyncerCore::Impl::on_transfer(Session& session, BulkLane& lane, Reassembly::Outcome outcome) {
  if (!outcome.error.empty()) return violation(session, outcome.error);
  if (!outcome.complete) return;
  if (session.lanes.size() > 1) {
    const auto all = gathered(session, lane);
    if (!all) return;
    outcome.complete = all->first;
    outcome.bytes = all->second;
  }
  const Begin& begin = *outcome.complete;
  const FragmentId p = begin.fragment;
  if (begin.kind == PayloadKind::kAnchor) return on_anchor(session, begin, std::move(outcome.bytes));

  session.pulled[p].reset();
  session.reserved -= slots[p].contribution.bytes;
  const Account& account = *session.account;
  const JobId job = next_job++;
  JobInfo& info = jobs[job];
  info.fragment = p;
  info.contribution = {account.learner, account.incarnation, begin, std::move(outcome.bytes), {}, now};
  actions.push_back(RunScreen{job, slots[p].contribution, info.contribution.payload});
}

void SyncerCore::Impl::on_screen_done(const ScreenDone& done) {
  const auto it = jobs.find(done.job);
  if (it == jobs.end()) return;
  Contribution contribution = std::move(it->second.contribution);
  jobs.erase(it);
  const FragmentId p = contribution.begin.fragment;
  Account& account = accounts.at(contribution.incarnation);
  for (auto& [id, session] : sessions) {
    if (session.control == 0 || session.account != &account || session.pulled[p]) continue;
    for (auto& [number, round] : rounds) {
      if (round.fragment == p) round.waiting.erase(id);
    }
  }
  if (!done.result.finite) {
    return refuse(account.learner, account.incarnation, contribution.begin, DiscardReason::kNonfinite, true,
                  "the contribution holds NaN or Inf");
  }
  contribution.norms = done.result.norms;
  if (account.tombstoned) return;
  if (contribution.begin.base.epoch != epoch) {
    return refuse(account.learner, account.incarnation, contribution.begin, DiscardReason::kStale, false,
                  fmt::format("its base version {} is of another epoch than {}",
                              to_string(contribution.begin.base), epoch));
  }
  if (too_stale(contribution.begin.base, p)) {
    return refuse(account.learner, account.incarnation, contribution.begin, DiscardReason::kStale, false,
                  fmt::format("its base version {} is too far behind {} (max_staleness)",
                              to_string(contribution.begin.base),
                              slots[p].state ? to_string(slots[p].state->version) : "what is coming"));
  }
  // What a merge under way takes with it counts as merged: it is, unless the merge fails.
  std::uint64_t merged_to = account.merged_to[p];
  for (const auto& [number, round] : rounds) {
    if (round.fragment != p) continue;
    for (const auto& member : round.members) {
      if (member.incarnation == account.incarnation) merged_to = std::max(merged_to, member.begin.to);
    }
  }
  if (contribution.begin.from < merged_to) {
    return refuse(account.learner, account.incarnation, contribution.begin, DiscardReason::kStale, false,
                  fmt::format("tokens before {} are merged already", merged_to));
  }
  auto& held = account.mailbox[p];
  if (held && (contribution.begin.from > held->begin.from || contribution.begin.to <= held->begin.to)) {
    return refuse(account.learner, account.incarnation, contribution.begin, DiscardReason::kStale, false,
                  "it does not contain the contribution that is held already");
  }
  held = std::move(contribution);
}

void SyncerCore::Impl::refuse(const std::string& learner, Incarnation incarnation, const Begin& begin,
                              DiscardReason reason, bool readopt, const std::string& text) {
  Account& account = accounts.at(incarnation);
  if (reason == DiscardReason::kNonfinite && begin.clock > account.bad_until) {
    // What was staged before the learner heard of it is the same accident, not a further one.
    ++account.bad_payloads;
    account.bad_until = std::max(account.clock, begin.clock);
  }
  record(nlohmann::json{{"event", "refuse"}, {"learner", learner}, {"incarnation", hex(incarnation)},
                        {"fragment", begin.fragment}, {"from", begin.from}, {"to", begin.to},
                        {"reason", reason_name(reason)}, {"text", text}});
  log(reason == DiscardReason::kStale ? LogLevel::kDebug : LogLevel::kWarning,
      fmt::format("refused learner '{}' on fragment {}, tokens [{}, {}): {}", learner, begin.fragment, begin.from,
                  begin.to, text));
  for (auto& [number, round] : rounds) {  // it may be asked again while the round is open
    if (round.fragment == begin.fragment) round.pulled.erase(learner);
  }
  for (auto& [id, session] : sessions) {
    if (session.control == 0 || session.account != &account) continue;
    Verdict verdict{begin.fragment, begin.from, begin.to, reason, readopt, text};
    send(session.control, MessageType::kVerdict, &session, encode(verdict), begin.fragment);
    if (account.bad_payloads >= settings.max_bad_payloads) {
      bury(account, fmt::format("learner '{}' sent {} contributions that were not finite (max_bad_payloads); "
                                "look at its loss, then start it again", learner, account.bad_payloads));
      send(session.control, MessageType::kReject, &session, encode(Reject{"ejected", account.tombstone}));
      end_session(id, "ejected: too many bad contributions", true);
    }
    return;
  }
}

// As stale; nothing if nothing is held.
void SyncerCore::Impl::refuse_held(Account& account, FragmentId p, const std::string& text) {
  auto& held = account.mailbox[p];
  if (!held) return;
  refuse(held->learner, held->incarnation, held->begin, DiscardReason::kStale, false, text);
  held.reset();
}

// Armed fragments: what a learner keeps staged so that a pull is answered at once, between two boundaries.
void SyncerCore::Impl::update_armed(std::optional<Clock> clock, Seconds step) {
  for (auto& [id, session] : sessions) {
    if (session.control == 0 || !session.whole) continue;
    std::set<FragmentId> armed;
    if (settings.trigger == Trigger::kArrival) {
      const Clock horizon = session.clock + settings.overlap_steps + 1;
      for (FragmentId p = 0; p < slots.size(); ++p) {
        if ((slots[p].state && session.has(p) && session.account->due[p] <= horizon) || session.pulled[p]) armed.insert(p);
      }
    } else if (clock && settings.mode == Mode::kDecoupled) {
      const Seconds own = session.step_s.value_or(step);
      const double steps = std::max<double>(settings.overlap_steps, step > 0.0 ? own / step : 1.0) + 1.0;
      const Clock horizon = *clock + static_cast<Clock>(steps);
      for (FragmentId p = 0; p < slots.size(); ++p) {
        if (slots[p].state && session.has(p) && slots[p].due <= horizon) armed.insert(p);
        if (session.pulled[p]) armed.insert(p);
      }
    }
    if (armed == session.armed) continue;
    session.armed = armed;
    send(session.control, MessageType::kArm, &session, encode(Arm{{armed.begin(), armed.end()}}));
  }
}

}  // namespace diloco
